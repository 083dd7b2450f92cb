"""When DDP sends its buckets of gradients, during the backward pass.

    python docs/figures/draw_buckets.py

The last layer's gradients are ready first. A bucket is sent once it is full, while
the backward pass goes on with the layers before. The times are made up.
"""

from matplotlib.figure import Figure

from figure_utils import WIDTH, hide_frame, save
from palette import GREEN, INDIGO, SAND

LAYERS, PER_BUCKET = 6, 2
FORWARD, BACKWARD, SEND = 1, 2, 3  # of a layer, of a layer, of a bucket


def draw_bar(axes, y, start, length, colour, text):
    ink = "black" if colour == SAND else "white"
    axes.barh(y, length, 0.8, start, color=colour, ec="white", lw=2)
    place = {"ha": "center", "va": "center", "size": 11, "color": ink}
    axes.text(start + length / 2, y, text, **place)


def main():
    axes = Figure(figsize=(WIDTH, 2.2), layout="constrained").add_subplot()
    time = sent = 0
    for layer in range(1, LAYERS + 1):
        draw_bar(axes, 1, time, FORWARD, INDIGO, layer)
        time += FORWARD
    for layer in range(LAYERS, 0, -1):
        draw_bar(axes, 1, time, BACKWARD, SAND, layer)
        time += BACKWARD
        if layer % PER_BUCKET == 1:
            sent = max(time, sent)
            names = f"{layer + PER_BUCKET - 1}, {layer}"
            draw_bar(axes, 0, sent, SEND, GREEN, names)
            sent += SEND
    axes.axvline(sent, color="black", ls=":")
    axes.text(sent + 0.15, 0.5, "optimizer\nstep", size=12, va="center")
    for y, name in ((1, "each GPU"), (0, "network")):
        axes.text(-0.2, y, name, size=13, ha="right", va="center")
    axes.text(0, 1.6, "forward", size=12, color=INDIGO)
    axes.text(LAYERS * FORWARD, 1.6, "backward", size=12, color="black")
    text = "all-reduces of buckets\n(here of 2 layers)"
    axes.text(9.8, 0, text, size=12, ha="right", va="center", color=GREEN)
    axes.set(xlim=(-2.2, sent + 2.2), ylim=(-0.6, 2))
    hide_frame(axes)
    save(axes.figure, "dp_ddp_intro/img/buckets.png")


if __name__ == "__main__":
    main()

"""Which samples DistributedSampler gives to each rank, in two epochs.

python docs/figures/draw_sampler.py
"""

from matplotlib.figure import Figure
from torch.utils.data import DistributedSampler

from figure_utils import WIDTH, draw_cells, hide_frame, save
from palette import GREEN, INDIGO

SAMPLES, RANKS = 12, 2


def main():
    panels = Figure(figsize=(WIDTH, 3.4), layout="constrained").subplots(2)
    for epoch, axes in enumerate(panels):
        for rank, colour in zip(range(RANKS), (INDIGO, GREEN), strict=True):
            sampler = DistributedSampler(range(SAMPLES), RANKS, rank)
            sampler.set_epoch(epoch)
            shard = [str(index) for index in sampler]
            axes.text(-0.2, -rank, f"rank {rank}", size=13, ha="right", va="center")
            draw_cells(axes, 0, -rank, shard, colour)
        axes.set_title(f"set_epoch({epoch})", loc="left", size=13, weight="bold")
        axes.set(xlim=(-1.2, SAMPLES / RANKS + 1))
        hide_frame(axes)
    save(panels[0].figure, "dp_ddp_intro/img/sampler.png")


if __name__ == "__main__":
    main()

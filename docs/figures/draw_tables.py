"""Draws who holds, computes and sends what: from DDP's all-reduce to FSDP + TP.

    python docs/figures/draw_tables.py

figure_utils.py says how the tables are written.
"""

from figure_utils import draw_table, save

INTRO, BEYOND = "dp_ddp_intro/img", "dp_ddp_intro/beyond_ddp/img"
TABLES = {
    f"{INTRO}/all_reduce.png": """
*DDP            | GPU 0 | GPU 1 | GPU 2
*forward        | on its own batch | on its own batch | on its own batch
*backward       | its own gradients | its own gradients | its own gradients
                | 2 0 4 | 4 1 0 | 0 2 2
                | [all-reduce: add up over the GPUs, divide by their number]
mean gradients  | 2 1 2 | 2 1 2 | 2 1 2
*step           | the same weights | the same weights | the same weights
""",
    f"{BEYOND}/zero.png": """
*ZeRO-1         | GPU 0 | GPU 1 | GPU 2
weights         | A B C | A B C | A B C
gradients       | A B C | A B C | A B C
optimizer state | A . . | . B . | . . C
*forward        | on its own batch | on its own batch | on its own batch
*backward       | [all-reduce: the mean of the gradients, as in DDP]
*step           | steps its part, A | steps its part, B | steps its part, C
weights         | A' B C | A B' C | A B C'
                | [broadcast: each GPU sends the part that it stepped]
weights         | A' B' C' | A' B' C' | A' B' C'
""",
    f"{BEYOND}/fsdp.png": """
*FSDP           | GPU 0 | GPU 1 | GPU 2
weights         | A . . | . B . | . . C
gradients       | A . . | . B . | . . C
optimizer state | A . . | . B . | . . C
*forward        | [all-gather: a layer's weights, freed after use]
layer's weights | A (B) (C) | (A) B (C) | (A) (B) C
                | on its own batch | on its own batch | on its own batch
*backward       | [all-gather: the layer's weights, once more]
its gradients   | A B C | A B C | A B C
                | [reduce-scatter: to each GPU the mean of its part]
gradients       | A . . | . B . | . . C
*step           | steps its part, A | steps its part, B | steps its part, C
""",
    f"{BEYOND}/hsdp.png": """
*HSDP           | GPU 0 | GPU 1 | GPU 2 | GPU 3
                | node 0 | node 1
weights         | A . | . B | A . | . B
gradients       | A . | . B | A . | . B
optimizer state | A . | . B | A . | . B
*forward        | [all-gather: a layer's weights] | [all-gather: a layer's weights]
*backward       | [all-gather: a layer's weights] | [all-gather: a layer's weights]
                | [reduce-scatter: its gradients] | [reduce-scatter: its gradients]
gradients       | A . | . B | A . | . B
                | [all-reduce between nodes: A of GPU 0 and 2, B of GPU 1 and 3]
*step           | steps its A | steps its B | steps its A | steps its B
""",
    f"{BEYOND}/tensor_parallel.png": """
*TP             | GPU 0 | GPU 1
*attention      | all of x | all of x
                | [in the backward pass, all-reduce: adds up the gradients of x]
qkv, by columns | A . | . B
                | its heads | its heads
proj, by rows   | A / . | . / B
                | [in the forward pass, all-reduce: adds up the partial sums]
*MLP            | all of x | all of x
                | [in the backward pass, all-reduce: adds up the gradients of x]
mlp 1, by columns | A . | . B
                | GELU | GELU
mlp 2, by rows  | A / . | . / B
                | [in the forward pass, all-reduce: adds up the partial sums]
""",
    f"{BEYOND}/fsdp_tp.png": """
*FSDP + TP      | GPU 0 | GPU 1 | GPU 2 | GPU 3
                | row 0: on the same batch | row 1: on another batch
*forward        | [FSDP, all-gather of weights: GPU 0 with 2, 1 with 3]
mlp 1, by columns | A (C) . . | . . B (D) | (A) C . . | . . (B) D
mlp 2, by rows  | A (C) / . . | . . / B (D) | (A) C / . . | . . / (B) D
                | [TP, all-reduce of activations] | [TP, all-reduce of activations]
*backward       | [FSDP, all-gather of weights: GPU 0 with 2, 1 with 3]
                | [TP, all-reduce of gradients] | [TP, all-reduce of gradients]
                | [FSDP, reduce-scatter of gradients: GPU 0 with 2, 1 with 3]
*step           | steps its A | steps its B | steps its C | steps its D
""",
}


def main():
    for file, text in TABLES.items():
        save(draw_table(text), file)


if __name__ == "__main__":
    main()

"""Tables of what each GPU holds, computes and sends, from DDP to FSDP + TP.

    python docs/figures/draw_tables.py

draw_table() in figure_utils.py explains the notation.
"""

from figure_utils import draw_table, save

INTRO, BEYOND = "dp_ddp_intro/img", "beyond_ddp/img"
TABLES = {
    f"{INTRO}/all_reduce.png": """
*DDP            | GPU 0 | GPU 1 | GPU 2
*forward        | local batch | local batch | local batch
*backward       | local gradients | local gradients | local gradients
                | 2 0 4 | 4 1 0 | 0 2 2
                | [all-reduce: sum over all GPUs, divided by their number]
mean gradients  | 2 1 2 | 2 1 2 | 2 1 2
*step           | the same weights | the same weights | the same weights
""",
    f"{BEYOND}/zero.png": """
*ZeRO-1         | GPU 0 | GPU 1 | GPU 2
weights         | A B C | A B C | A B C
gradients       | A B C | A B C | A B C
optimizer state | A . . | . B . | . . C
*forward        | local batch | local batch | local batch
*backward       | [all-reduce: mean of the gradients, as in DDP]
*step           | updates A | updates B | updates C
weights         | A' B C | A B' C | A B C'
                | [broadcast: each GPU sends the shard that it updated]
weights         | A' B' C' | A' B' C' | A' B' C'
""",
    f"{BEYOND}/fsdp.png": """
*FSDP           | GPU 0 | GPU 1 | GPU 2
weights         | A . . | . B . | . . C
gradients       | A . . | . B . | . . C
optimizer state | A . . | . B . | . . C
*forward        | [all-gather: the layer's weights, freed after use]
layer's weights | A (B) (C) | (A) B (C) | (A) (B) C
                | local batch | local batch | local batch
*backward       | [all-gather: the layer's weights again]
layer's gradients | A B C | A B C | A B C
                | [reduce-scatter: each GPU gets the mean of one shard]
gradients       | A . . | . B . | . . C
*step           | updates A | updates B | updates C
""",
    f"{BEYOND}/hsdp.png": """
*HSDP           | GPU 0 | GPU 1 | GPU 2 | GPU 3
                | node 0 | node 1
weights         | A . | . B | A . | . B
gradients       | A . | . B | A . | . B
optimizer state | A . | . B | A . | . B
*forward        | [all-gather: layer's weights] | [all-gather: layer's weights]
*backward       | [all-gather: layer's weights] | [all-gather: layer's weights]
                | [reduce-scatter: gradients] | [reduce-scatter: gradients]
gradients       | A . | . B | A . | . B
                | [all-reduce between nodes: A on GPUs 0 and 2, B on GPUs 1 and 3]
*step           | updates A | updates B | updates A | updates B
""",
    f"{BEYOND}/tensor_parallel.png": """
*TP             | GPU 0 | GPU 1
*attention      | full x | full x
                | [all-reduce in the backward pass: sum of the gradients of x]
qkv, by columns | A . | . B
                | half of the heads | half of the heads
proj, by rows   | A / . | . / B
                | [all-reduce in the forward pass: sum of the partial results]
*MLP            | full x | full x
                | [all-reduce in the backward pass: sum of the gradients of x]
mlp 1, by columns | A . | . B
                | GELU | GELU
mlp 2, by rows  | A / . | . / B
                | [all-reduce in the forward pass: sum of the partial results]
""",
    f"{BEYOND}/fsdp_tp.png": """
*FSDP + TP      | GPU 0 | GPU 1 | GPU 2 | GPU 3
                | mesh row 0: one batch | mesh row 1: another batch
*forward        | [FSDP: all-gather of the weights: GPU 0 with 2, GPU 1 with 3]
mlp 1, by columns | A (C) . . | . . B (D) | (A) C . . | . . (B) D
mlp 2, by rows  | A (C) / . . | . . / B (D) | (A) C / . . | . . / (B) D
                | [TP: all-reduce of activations] | [TP: all-reduce of activations]
*backward       | [FSDP: all-gather of the weights: GPU 0 with 2, GPU 1 with 3]
                | [TP: all-reduce of gradients] | [TP: all-reduce of gradients]
                | [FSDP: reduce-scatter of the gradients: GPU 0 with 2, GPU 1 with 3]
*step           | updates A | updates B | updates C | updates D
""",
}


def main():
    for file, text in TABLES.items():
        save(draw_table(text), file)


if __name__ == "__main__":
    main()

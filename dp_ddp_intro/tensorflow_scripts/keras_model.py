"""The transformer of ../model.py, in Keras."""

import sys

import keras
import tensorflow as tf
from keras import Input, Model, layers, losses, optimizers

from common.errors import UserError
from dataset import VOCABULARY


def print_input_size(tokens):
    """Print each replica's number and the size of its input, in every step."""
    replica = tf.distribute.get_replica_context()
    if replica:  # None while the model is being built
        number, size = replica.replica_id_in_sync_group, tf.shape(tokens)
        hello = "Hello from replica", number, "with input size", size
        tf.print(*hello, output_stream=sys.stdout)


class Embedding(layers.Layer):
    """Maps tokens (N, length) and their positions to vectors (N, length, width)."""

    def __init__(self, width, length, verbose=False):
        super().__init__()
        self.verbose = verbose
        self.token = self.add_weight((VOCABULARY, width))
        self.position = self.add_weight((length, width))

    def call(self, tokens):
        if self.verbose:
            print_input_size(tokens)
        # Not layers.Embedding: if a token occurs twice, Keras's Adam applies sparse
        # gradients differently on one device and on two (tested with 3.15).
        return keras.ops.one_hot(tokens, VOCABULARY) @ self.token + self.position


def make_model(args):
    """Return a compiled model that maps tokens to logits of the next ones.

    args: the options layers, width, heads, length, lr and verbose. Raises UserError
    if width is not divisible by heads.
    """
    width, heads = args.width, args.heads
    if width % heads:
        problem = f"--width {width} is not divisible by --heads {heads}"
        raise UserError(f"{problem}; use --width {-(-width // heads) * heads}")
    tokens = Input((args.length,), dtype="int32")
    x = Embedding(width, args.length, args.verbose)(tokens)
    for _ in range(args.layers):
        y = layers.LayerNormalization(epsilon=1e-5)(x)
        # This contains the layers that ../model.py calls qkv and proj.
        attention = layers.MultiHeadAttention(heads, width // heads)
        # Causal: no token sees a later one.
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.LayerNormalization(epsilon=1e-5)(x)
        mlp = layers.Dense(4 * width, activation="gelu")(y)
        x = x + layers.Dense(width)(mlp)
    logits = layers.Dense(VOCABULARY)(layers.LayerNormalization(epsilon=1e-5)(x))
    model = Model(tokens, logits)
    model.compile(
        optimizer=optimizers.Adam(args.lr),
        loss=losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,  # the default compiles on GPUs, but not under a strategy
    )
    return model

"""The transformer of ../model.py, in Keras."""

import sys

import keras
import tensorflow as tf
from keras import Input, Model, layers, losses, optimizers

from common.cli import UserError
from dataset import VOCABULARY

if keras.__version__ < "3":
    raise UserError(
        f"TensorFlow {tf.__version__} is too old: this needs 2.16 or later, so run "
        "`make venv-tensorflow`, or load a newer module"
    )


def say_hello(tokens):
    """Let each replica say, in each step, who it is and what it gets."""
    replica = tf.distribute.get_replica_context()
    if replica:  # none yet while the model is put together
        number, size = replica.replica_id_in_sync_group, tf.shape(tokens)
        hello = "Hello from replica", number, "with input size", size
        tf.print(*hello, output_stream=sys.stdout)


class Embedding(layers.Layer):
    """Makes of tokens (N, length) vectors (N, length, width) with their position."""

    def __init__(self, width, length, verbose=False):
        super().__init__()
        self.verbose = verbose
        self.token = self.add_weight((VOCABULARY, width))
        self.position = self.add_weight((length, width))

    def call(self, tokens):
        if self.verbose:
            say_hello(tokens)
        # Not layers.Embedding: where a token occurs twice, Keras's Adam makes other
        # steps of its sparse gradients on one device than on two (tried: 3.15).
        return keras.ops.one_hot(tokens, VOCABULARY) @ self.token + self.position


def make_model(args):
    """Return a compiled model, from tokens to logits of the next; see ../model.py.

    args: the options layers, width, heads, length, lr and verbose. Raises UserError
    if the heads cannot share the width.
    """
    width, heads = args.width, args.heads
    if width % heads:
        raise UserError(
            f"a width of {width} cannot be split over {heads} heads: use "
            f"--width {-(-width // heads) * heads}"
        )
    tokens = Input((args.length,), dtype="int32")
    x = Embedding(width, args.length, args.verbose)(tokens)
    for _ in range(args.layers):
        y = layers.LayerNormalization(epsilon=1e-5)(x)
        # What ../model.py calls qkv and proj is in it.
        attention = layers.MultiHeadAttention(heads, width // heads)
        # Causal: a token looks back, never ahead.
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
        jit_compile=False,  # else on a GPU Keras would do so without a strategy only
    )
    return model

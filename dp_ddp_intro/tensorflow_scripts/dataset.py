"""Random sequences of tokens, as in ../dataset.py, for TensorFlow."""

import numpy as np
import tensorflow as tf

VOCABULARY = 256


def random_sequences(count, length, seed=0):
    """Return a tf.data.Dataset of tokens (length,) and the token after each.

    Each token has one successor, which follows it nine times out of ten; otherwise
    any token follows. A model that has learnt the successors reaches a loss of 0.9,
    while a uniform guess gives ln(256) = 5.5. The seed is fixed, so that all
    processes make the same data.
    """
    rng = np.random.default_rng(seed)
    successor = rng.permutation(VOCABULARY)
    noise = rng.random((count, length + 1)) < 0.1
    tokens = rng.integers(VOCABULARY, size=(count, length + 1))
    for i in range(1, length + 1):
        follows = successor[tokens[:, i - 1]]
        tokens[:, i] = np.where(noise[:, i], tokens[:, i], follows)
    return tf.data.Dataset.from_tensor_slices((tokens[:, :-1], tokens[:, 1:]))

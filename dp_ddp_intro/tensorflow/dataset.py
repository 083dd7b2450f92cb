"""The random sequences of ../dataset.py, made with NumPy for TensorFlow."""

import numpy as np
import tensorflow as tf

VOCABULARY = 256


def random_sequences(count, length, seed=0):
    """Return a tf.data set of tokens (length,), and of those that come next.

    Each token has its own successor, which follows it nine times out of ten; else
    comes any token. Who knows that has a loss of 0.9, and who knows nothing one of
    ln(256) = 5.5. The seed is fixed: else each process would draw data of its own.
    """
    random = np.random.default_rng(seed)
    successor = random.permutation(VOCABULARY)
    noise = random.random((count, length + 1)) < 0.1
    tokens = random.integers(VOCABULARY, size=(count, length + 1))
    for i in range(1, length + 1):
        follows = successor[tokens[:, i - 1]]
        tokens[:, i] = np.where(noise[:, i], tokens[:, i], follows)
    return tf.data.Dataset.from_tensor_slices((tokens[:, :-1], tokens[:, 1:]))

"""The transformer in TensorFlow on several nodes, with all GPUs of each.

    sbatch jobscript_tensorflow_2nodes.sh tensorflow/multi_worker_mirrored.py

Without a GPU add $SMALL, which `source common/env.sh` sets: a small model.
"""

import os
import sys
import time

import tensorflow as tf
from keras.utils import set_random_seed

from common.cli import OptionParser, UserError, at_least, check_appendable
from dataset import random_sequences
from model import make_model
from report import RESULTS, Report


def make_strategy():
    """Return the strategy, and its resolver, which knows the workers.

    Slurm's step says which nodes there are; without Slurm TF_CONFIG does. Raises
    UserError if neither is there. TensorFlow sorts the nodes' names as texts, Slurm
    by their numbers: so n9 and n10 would not find each other, n09 and n10 do.
    """
    resolvers = tf.distribute.cluster_resolver
    if "SLURM_STEP_NODELIST" in os.environ:
        port = 10000 + int(os.environ["SLURM_JOB_ID"]) % 50000  # of this job's own
        gpus = max(1, len(tf.config.list_physical_devices("GPU")))
        resolver = resolvers.SlurmClusterResolver(
            port_base=port, gpus_per_node=gpus, auto_set_gpu=False
        )
    elif "TF_CONFIG" not in os.environ:
        raise UserError(
            f"{sys.argv[0]} is for several nodes: run "
            f"`sbatch jobscript_tensorflow_2nodes.sh {sys.argv[0]}`"
        )
    else:
        resolver = resolvers.TFConfigClusterResolver()
    strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    return strategy, resolver


def make_step(model, strategy):
    """Return the function that trains on a batch; it returns loss and accuracy.

    With several workers Keras 3's fit() fails on a batch (tried: 3.15), so a step is
    written out here.
    """

    def step_of_replica(tokens, targets):
        with tf.GradientTape() as tape:
            logits = model(tokens, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
            loss = tf.reduce_mean(losses)
            # The optimizer adds up the gradients of all replicas: make that a mean.
            share = loss / strategy.num_replicas_in_sync
        gradients = tape.gradient(share, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        right = tf.argmax(logits, axis=-1) == targets
        return loss, tf.reduce_mean(tf.cast(right, tf.float32))

    @tf.function
    def step(tokens, targets):
        results = strategy.run(step_of_replica, args=(tokens, targets))
        return [strategy.reduce("MEAN", result, axis=None) for result in results]

    return step


def main():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--epochs", type=at_least(1), default=4, help="passes over the data")
    add("--sequences", type=at_least(1), default=1024, help="in the data set")
    add("--batch-size", type=at_least(1), default=16, help="sequences per GPU")
    add("--lr", type=at_least(0.0), default=0.0003, help="learning rate")
    add("--layers", type=at_least(1), default=12, help="of the transformer")
    add("--width", type=at_least(1), default=768, help="numbers for each token")
    add("--heads", type=at_least(1), default=12, help="of attention")
    add("--length", type=at_least(1), default=256, help="of a sequence, in tokens")
    add("--verbose", action="store_true", help="each replica says what it gets")
    add("--seed", type=int, default=0, help="of the weights and the order")
    args = parser.parse_args()
    check_appendable(RESULTS)  # before the workers meet: those left would complain

    strategy, resolver = make_strategy()  # before TensorFlow does anything else
    set_random_seed(args.seed)
    with strategy.scope():
        model = make_model(args)
        model.optimizer.build(model.trainable_variables)

    dataset = random_sequences(args.sequences, args.length)
    dataset = dataset.shuffle(args.sequences, seed=args.seed)
    batch_size = args.batch_size * strategy.num_replicas_in_sync
    dataset = dataset.batch(batch_size, drop_remainder=True)
    nodes = resolver.cluster_spec().num_tasks("worker")
    report = Report(
        args, dataset, strategy.num_replicas_in_sync, nodes, resolver.task_id == 0
    )
    options = tf.data.Options()  # each worker takes its share of each batch
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    batches = strategy.experimental_distribute_dataset(dataset.with_options(options))

    step = make_step(model, strategy)
    for epoch in range(args.epochs):
        report.on_epoch_begin(epoch)
        sums = 0
        for number, (tokens, targets) in enumerate(batches):
            report.on_train_batch_begin(number)
            sums += tf.stack(step(tokens, targets))
        loss, accuracy = (sums / len(dataset)).numpy().tolist()
        report.on_epoch_end(epoch, {"loss": loss, "accuracy": accuracy})
    report.on_train_end()
    if resolver.task_id == 0:
        time.sleep(2)  # if it were not the last to leave, the others would complain


if __name__ == "__main__":
    main()

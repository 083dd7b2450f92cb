"""The pairs of scripts, and how many lines of each may differ."""

CIFAR = "cifar100_demo/train"
MNIST = "mnist_multigpu/mnist"
CINIC = "cinic_lab/cinic"
INTRO = "dp_ddp_intro"
KERAS = "dp_ddp_intro/tensorflow_scripts"
BEYOND = "beyond_ddp"
EIGHT = "exercise8/pytorch_dvc_cnn_pretrained"
STRONG = "exercise8/solutions/strong_scaling"

# left, right, tag of the lesson, most lines of diff -y --suppress-common-lines
PAIRS = [
    (f"{EIGHT}.py", f"{EIGHT}_multigpu.py", "DDP", 21),
    (f"{EIGHT}.py", f"{EIGHT}_largedata.py", "DATA", 5),
    (f"{EIGHT}_multigpu.py", f"{EIGHT}_largedata_multigpu.py", "DATA", 5),
    (f"{EIGHT}_largedata.py", f"{EIGHT}_largedata_multigpu.py", "DDP", 21),
    (f"{EIGHT}_multigpu.py", f"{STRONG}.py", "STRONG", 7),
    (f"{MNIST}_singlegpu.py", f"{MNIST}_multigpu.py", "DP", 7),
    (f"{MNIST}_singlegpu.py", f"{MNIST}_ddp.py", "DDP", 21),
    (f"{CIFAR}_cifar100.py", f"{CIFAR}_data_parallel.py", "DP", 7),
    (f"{CIFAR}_cifar100.py", f"{CIFAR}_ddp_cifar100.py", "DDP", 21),
    (f"{CINIC}.py", f"{CINIC}_amp.py", "AMP", 15),
    (f"{CINIC}_amp.py", f"{CINIC}_tensorboard.py", "TB", 13),
    (f"{CINIC}_amp.py", f"{CINIC}_wandb.py", "WANDB", 13),
    (f"{CINIC}_tensorboard.py", f"{CINIC}_dp.py", "DP", 7),
    (f"{CINIC}_tensorboard.py", f"{CINIC}_ddp.py", "DDP", 23),
    (f"{CINIC}_ddp.py", f"{CINIC}_requeue.py", "REQUEUE", 9),
    (f"{CINIC}_ddp.py", f"{CINIC}_syncbn.py", "BN", 4),
    (f"{INTRO}/single.py", f"{INTRO}/dp.py", "DP", 7),
    (f"{INTRO}/single.py", f"{INTRO}/ddp.py", "DDP", 21),
    (f"{INTRO}/single.py", f"{INTRO}/ddp_unfinished.py", "DDP", 21),
    (f"{INTRO}/ddp_unfinished.py", f"{INTRO}/ddp.py", "DDP", 7),
    (f"{INTRO}/ddp.py", f"{BEYOND}/accumulate.py", "ACC", 13),
    (f"{INTRO}/ddp.py", f"{BEYOND}/bf16_gradients.py", "HOOK", 5),
    (f"{INTRO}/ddp.py", f"{BEYOND}/powersgd.py", "HOOK", 8),
    (f"{INTRO}/ddp.py", f"{BEYOND}/local_sgd.py", "LSGD", 15),
    (f"{BEYOND}/local_sgd.py", f"{BEYOND}/diloco.py", "DILOCO", 14),
    (f"{INTRO}/ddp.py", f"{BEYOND}/streaming.py", "STREAM", 15),
    (f"{INTRO}/ddp.py", f"{BEYOND}/elastic.py", "ELASTIC", 11),
    (f"{INTRO}/ddp.py", f"{BEYOND}/zero.py", "ZERO", 5),
    (f"{INTRO}/ddp.py", f"{BEYOND}/checkpointing.py", "AC", 7),
    (f"{INTRO}/ddp.py", f"{BEYOND}/compiled.py", "COMPILE", 3),
    (f"{INTRO}/ddp.py", f"{BEYOND}/fsdp.py", "FSDP", 16),
    (f"{BEYOND}/fsdp.py", f"{BEYOND}/fsdp_checkpoint.py", "DCP", 13),
    (f"{BEYOND}/fsdp.py", f"{BEYOND}/hsdp.py", "HSDP", 7),
    (f"{INTRO}/single.py", f"{BEYOND}/tensor_parallel.py", "TP", 25),
    (f"{BEYOND}/fsdp.py", f"{BEYOND}/fsdp_tp.py", "TP", 21),
    (f"{INTRO}/single.py", f"{BEYOND}/context_parallel.py", "CP", 27),
    (f"{INTRO}/single.py", f"{BEYOND}/pipeline.py", "PP", 30),
    (f"{INTRO}/ddp.py", f"{BEYOND}/experts.py", "EP", 16),
    (f"{KERAS}/single.py", f"{KERAS}/mirrored_strategy.py", "MIRRORED", 7),
    *(
        (f"clinic/patient{n}.py", f"clinic/solutions/patient{n}.py", "FIX", 4)
        for n in range(1, 13)
    ),
]

"""Train a network on wrong labels, on any number of ranks.

    deepspeed launch/train.py --cfg webvision.yaml
    torchrun --nproc-per-node 8 launch/train.py --cfg webvision.yaml optim.lr=0.01 data.root=/data/webvision
    accelerate launch --multi_gpu --num_processes 8 launch/train.py --cfg webvision.yaml --resume auto
    srun python launch/train.py --cfg webvision.yaml
    python launch/train.py --cfg demo.yaml

`--help` explains the options, `--help-config` every key of a config. `sopdist train` is the same for one process.
"""

import sys

from sopdist.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))

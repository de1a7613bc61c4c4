"""Train a network on noisy labels, on any number of ranks. Start it with a launcher:

    deepspeed launch/train.py --cfg webvision.yaml
    torchrun --nproc-per-node 8 launch/train.py --cfg webvision.yaml optim.lr=0.01 data.root=/data/webvision
    accelerate launch --multi_gpu --num_processes 8 launch/train.py --cfg webvision.yaml --resume auto
    srun python launch/train.py --cfg webvision.yaml
    python launch/train.py --cfg demo.yaml

`--help` lists the options, `--help-config` every config key. `sopdist train` does the same in one process.
"""

import sys

from sopdist.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))

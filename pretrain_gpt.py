"""Pre-trains a GPT of megatron-core, sharded by megatron_fsdp.

    torchrun --nproc-per-node 2 pretrain_gpt.py --use-megatron-fsdp <flags>

or `python pretrain_gpt.py` for one process, or `-m pretrain_gpt` where the package is installed. `--help` lists the
flags. What is trained is defined in `megatron.training.gpt`; a script of your own names its own module here.
"""

import sys

from megatron.training.launch import launch


def main() -> int:
    """Trains as the command line says; gives back the exit code; 2 is a configuration that cannot be run."""
    return launch("megatron.training.gpt")


if __name__ == "__main__":
    sys.exit(main())

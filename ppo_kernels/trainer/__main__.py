"""`torchrun --nproc_per_node N -m ppo_kernels.trainer config.yaml`: what ppo-train does, on N ranks."""

import sys

from ppo_kernels.trainer.cli import main

sys.exit(main())

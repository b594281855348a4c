"""Adapters to other trainers, one file each. None is imported by `import ppo_kernels`; each imports its trainer."""

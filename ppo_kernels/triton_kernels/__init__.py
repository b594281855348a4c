"""The GPU kernels, one file each, with their launchers. ops.py imports them when a tensor on a GPU first needs them."""

from ppo_kernels.triton_kernels.gae_scan import gae
from ppo_kernels.triton_kernels.row_fused import row_fused, row_fused_
from ppo_kernels.triton_kernels.row_grad import row_grad, row_grad_
from ppo_kernels.triton_kernels.row_stats import row_stats
from ppo_kernels.triton_kernels.rows import MAX_VOCAB
from ppo_kernels.triton_kernels.scale import scale_
from ppo_kernels.triton_kernels.token_loss import token_loss
from ppo_kernels.triton_kernels.whiten import whiten

__all__ = [
    "MAX_VOCAB",
    "gae",
    "row_fused",
    "row_fused_",
    "row_grad",
    "row_grad_",
    "row_stats",
    "scale_",
    "token_loss",
    "whiten",
]

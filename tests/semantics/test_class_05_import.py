"""Class 5, row 47: what importing the package needs and what a backend that cannot run says."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

ONE_CALL = "import torch, ppo_kernels; ppo_kernels.logprobs_from_logits(torch.randn(2, 3), torch.tensor([0, 1]))"


def run_python(code, **env):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_case_47_imports_and_works_without_triton(not_interpreted):
    result = run_python(
        """
        import sys
        sys.modules["triton"] = None
        import torch, ppo_kernels
        x = torch.randn(3, 5, requires_grad=True)
        ppo_kernels.fused_ppo_loss(x, torch.tensor([0, 1, 2]), None, torch.ones(3)).loss.backward()
        assert x.grad.abs().sum() > 0
        assert "transformers" not in sys.modules
        """
    )
    assert result.returncode == 0, result.stderr


def test_case_47_importing_does_not_import_triton_transformers_or_the_trainer():
    result = run_python(
        """
        import sys, torch
        before = set(sys.modules)
        import ppo_kernels
        new = set(sys.modules) - before
        assert not new & {"triton", "transformers", "ppo_kernels.trainer"}, new
        """
    )
    assert result.returncode == 0, result.stderr


def test_case_47_a_backend_that_cannot_run_says_so():
    result = run_python("import sys; sys.modules['triton'] = None\n" + ONE_CALL, PPO_KERNELS_BACKEND="triton")
    assert result.returncode != 0
    assert "triton" in result.stderr.splitlines()[-1].lower()


def test_case_47_an_unknown_backend_names_the_choices():
    result = run_python(ONE_CALL, PPO_KERNELS_BACKEND="fortran")
    assert result.returncode != 0
    assert "fortran" in result.stderr
    assert "reference" in result.stderr

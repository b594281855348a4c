"""What every run does on first use, done once in the fork server; none of it starts a thread."""

import fsspec.core  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")  # it compiles a thousand patterns

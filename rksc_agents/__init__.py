"""Multi-branch reasoning on local Hugging Face models: branches share one KV cache."""

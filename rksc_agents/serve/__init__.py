"""An OpenAI-compatible server on a reasoner: any OpenAI client gets votes, verification and one shared KV cache."""

from rksc_agents.serve.app import make_app
from rksc_agents.serve.limits import Limits

__all__ = ["Limits", "make_app"]

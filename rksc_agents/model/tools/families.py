"""Which way of writing tool calls a model was taught, by its chat template."""

from __future__ import annotations

from rksc_agents.model.tools.formats import ToolFormat
from rksc_agents.model.tools.hermes import OPEN, Generic, Hermes
from rksc_agents.model.tools.llama import Llama
from rksc_agents.model.tools.mistral import ARGS, MARKER, Mistral, MistralArgs
from rksc_agents.model.tools.qwen_xml import QwenXML


def format_of(template: str) -> ToolFormat:
    """The format that a chat template teaches; :class:`Generic` where it teaches none, or one that is not read here.

    Parameters
    ----------
    template : str
        The chat template's text, empty for none.
    """
    if "tools" not in template:
        return Generic()
    if MARKER in template:
        return MistralArgs() if ARGS in template else Mistral()
    if OPEN in template:
        return QwenXML() if "<function=" in template else Hermes()
    if "python_tag" in template or ("ipython" in template and '"parameters"' in template):
        return Llama()
    return Generic()

"""A process of `rksc bench load`: it loads the model that it is given and asks for one token."""

from __future__ import annotations

import json
import sys
import time

QUESTION = "How many legs do 3 cats have?"


def main(model: str) -> None:
    """Print a line of JSON when the first token is there: import_s, load_s and token_s, one after the other."""
    began = time.perf_counter()
    from transformers.utils import logging

    from rksc_agents.events import BranchToken
    from rksc_agents.reasoner import RKSCReasoner

    logging.disable_progress_bar()
    imported = time.perf_counter()
    with RKSCReasoner.from_pretrained(model) as reasoner:
        loaded = time.perf_counter()
        for event in reasoner.stream(QUESTION, max_tokens=1):
            if isinstance(event, BranchToken):
                there = time.perf_counter()
                parts = {"import_s": imported - began, "load_s": loaded - imported, "token_s": there - loaded}
                sys.stdout.write(json.dumps(parts) + "\n")
                sys.stdout.flush()
                break


if __name__ == "__main__":
    main(sys.argv[1])

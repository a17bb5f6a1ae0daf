"""What the adapters of frameworks share: settings, a reasoner that loads when it is used, calls, events, results.

Nothing here imports torch before a model is used, and nothing knows a framework.
"""

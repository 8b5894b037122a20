"""Steps and seconds to a target: K-FAC against SGD with momentum, AdamW and SOAP, tuned with equal budgets.

``python -m benchmarks.optimisation`` finds targets, tunes, evaluates, times and writes the tables of
``docs/optimisation.md``. The stages are jobs whose results are kept, so that an interrupted run goes on where it was.
"""

"""The benchmark: suites as tables, a run that goes on where it was stopped, a report, a comparison."""

"""Exercises: the learner's cell, judged in a process of its own; verdict, hints, solution, race."""

"""Figures, tables that answer questions, live sweeps, guesses and claims."""

"""What was launched and compiled: profiles, launches counted without a GPU, PTX."""

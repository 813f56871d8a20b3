"""The command line: lessons executed, a learner's folder, the machine's doctor."""

"""The commands of ``python -m fused_rope_xattn``, one module each.

A command module has HELP, add_arguments(parser) and run(args), which returns the exit code.
"""

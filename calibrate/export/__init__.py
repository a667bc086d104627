"""Exports: a fit written into a copy of its model, for engines that do not run calibrate.

Each format is one file with the same three functions, such as `prepare_folder`, which checks that
the export is exact, `write_folder`, and `check_folder`, which reads it back and compares it with
what was written. `export_onnx` replaces the softmax of a graph.
"""

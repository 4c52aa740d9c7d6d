"""The experiments, one a file: settings, cells, how one is measured, tables and a picture."""

"""Our own kernels: `cpu` (C++ and its Python face) and `triton`. They import nothing else of ours."""

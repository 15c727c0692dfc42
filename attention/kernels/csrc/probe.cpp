#include <torch/library.h>
TORCH_LIBRARY(lra_probe, m) { m.def("one(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(lra_probe, CPU, m) { m.impl("one", [](const at::Tensor& x) { return x; }); }

// The only source that knows torch: the ops' CPU and autograd kernels, and their entry from Python.
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/TracerMode.h>
#include <torch/csrc/utils/pybind.h>

#include "../_add_row_norm/bind.h"
#include "../_affine/bind.h"
#include "../_batch_norm/bind.h"
#include "../_batch_norm/layer.h"
#include "../_group_norm/bind.h"
#include "../_moments/bind.h"
#include "../_row_norm/bind.h"
#include "../_running/bind.h"

#define MUSIGMA_OPS(each) each(row_norm) each(add_row_norm) each(group_norm) each(batch_norm) each(moments) each(affine)

namespace {

// Not by TORCH_LIBRARY_IMPL: what that raises, about a schema that has changed since the build, ends the process.
void add_kernels() {
  const auto library = [](c10::DispatchKey key) {
    return std::make_unique<torch::Library>(torch::Library::IMPL, "musigma", key, __FILE__, __LINE__);
  };
  auto cpu = library(c10::DispatchKey::CPU), autograd = library(c10::DispatchKey::AutogradCPU);
#define MUSIGMA_ADD(name)                                    \
  cpu->impl(#name, musigma::name::forward);                  \
  cpu->impl(#name "_backward", musigma::name::backward);     \
  autograd->impl(#name, musigma::name::forward_autograd);    \
  autograd->impl(#name "_backward", musigma::name::backward_autograd);
  MUSIGMA_OPS(MUSIGMA_ADD)
  cpu->impl("running_update_", musigma::running::update);
  autograd->impl("running_update_", torch::CppFunction::makeFallthrough());
  // All or none; and as long as the process lives.
  cpu.release(), autograd.release();
}

using musigma::MaybeTensor;
using at::Tensor;

// The entries take what the ops take, in the same order, and skip the dispatcher's schema parser, which costs more than
// a small tensor's arithmetic. A call that is not plain (a tensor subclass, a mode that listens) goes to the op itself.
struct Arguments {
  PyObject* const* values;
  Py_ssize_t count;
  bool plain = true;

  Arguments(PyObject* const* values, Py_ssize_t count, Py_ssize_t expected) : values(values), count(count) {
    plain = count == expected && !at::impl::torch_function_mode_enabled();
  }
  Tensor tensor(int i) {
    if (!plain || !THPVariable_CheckExact(values[i])) return plain = false, Tensor();
    return THPVariable_Unpack(values[i]);
  }
  MaybeTensor maybe(int i) {
    if (!plain || values[i] == Py_None) return std::nullopt;
    return tensor(i);
  }
  int64_t integer(int i) {
    if (!plain || !PyLong_Check(values[i])) return plain = false, 0;
    return checked<int64_t>(PyLong_AsLongLong(values[i]));
  }
  double number(int i) {
    if (!plain || !(PyFloat_Check(values[i]) || PyLong_Check(values[i]))) return plain = false, 0;
    return checked(PyFloat_AsDouble(values[i]));
  }
  bool flag(int i) {
    if (!plain || !PyBool_Check(values[i])) return plain = false, false;
    return values[i] == Py_True;
  }
  musigma::Name text(int i) {
    if (!plain || values[i] == Py_None) return std::nullopt;
    if (!PyUnicode_Check(values[i])) return plain = false, std::nullopt;
    Py_ssize_t size = 0;
    const char* characters = PyUnicode_AsUTF8AndSize(values[i], &size);
    if (!characters) return PyErr_Clear(), plain = false, std::nullopt;
    return std::string_view(characters, size);
  }

 private:
  // What C++ can't hold is the dispatcher's to refuse.
  template <class T>
  T checked(T value) {
    if (value == T(-1) && PyErr_Occurred()) PyErr_Clear(), plain = false;
    return value;
  }
};

PyObject* through_op(const char* name, PyObject* const* values, Py_ssize_t count) {
  py::object op = py::module_::import("torch").attr("ops").attr("musigma").attr(name).attr("default");
  return PyObject_Vectorcall(op.ptr(), values, count, nullptr);
}

template <class... T>
PyObject* wrap(std::tuple<T...>&& results) {
  PyObject* tuple = PyTuple_New(sizeof...(T));
  if (!tuple) throw python_error();
  Py_ssize_t i = 0;
  std::apply([&](auto&&... t) { (PyTuple_SET_ITEM(tuple, i++, THPVariable_Wrap(std::move(t))), ...); }, std::move(results));
  return tuple;
}

PyObject* row_norm(PyObject*, PyObject* const* values, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Arguments a(values, count, 7);
  const Tensor x = a.tensor(0);
  const int64_t n_dims = a.integer(1);
  const MaybeTensor weight = a.maybe(2), bias = a.maybe(3);
  const double eps = a.number(4);
  const bool center = a.flag(5);
  const musigma::Name activation = a.text(6);
  if (!a.plain) return through_op("row_norm", values, count);
  musigma::row_norm::Result results;
  {
    py::gil_scoped_release release;
    results = musigma::row_norm::forward_op().call(x, n_dims, weight, bias, eps, center, activation);
  }
  return wrap(std::move(results));
  END_HANDLE_TH_ERRORS
}

PyObject* add_row_norm(PyObject*, PyObject* const* values, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Arguments a(values, count, 8);
  const Tensor x = a.tensor(0), residual = a.tensor(1);
  const int64_t n_dims = a.integer(2);
  const MaybeTensor weight = a.maybe(3), bias = a.maybe(4);
  const double eps = a.number(5);
  const bool center = a.flag(6);
  const musigma::Name activation = a.text(7);
  if (!a.plain) return through_op("add_row_norm", values, count);
  musigma::add_row_norm::Result results;
  {
    py::gil_scoped_release release;
    results = musigma::add_row_norm::forward_op().call(x, residual, n_dims, weight, bias, eps, center, activation);
  }
  return wrap(std::move(results));
  END_HANDLE_TH_ERRORS
}

PyObject* group_norm(PyObject*, PyObject* const* values, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Arguments a(values, count, 6);
  const Tensor x = a.tensor(0);
  const int64_t groups = a.integer(1);
  const MaybeTensor weight = a.maybe(2), bias = a.maybe(3);
  const double eps = a.number(4);
  const musigma::Name activation = a.text(5);
  if (!a.plain) return through_op("group_norm", values, count);
  musigma::group_norm::Result results;
  {
    py::gil_scoped_release release;
    results = musigma::group_norm::forward_op().call(x, groups, weight, bias, eps, activation);
  }
  return wrap(std::move(results));
  END_HANDLE_TH_ERRORS
}

PyObject* batch_norm(PyObject*, PyObject* const* values, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Arguments a(values, count, 6);
  const Tensor x = a.tensor(0);
  const MaybeTensor weight = a.maybe(1), bias = a.maybe(2);
  const double eps = a.number(3);
  const MaybeTensor add = a.maybe(4);
  const musigma::Name activation = a.text(5);
  if (!a.plain) return through_op("batch_norm", values, count);
  musigma::batch_norm::Result results;
  {
    py::gil_scoped_release release;
    results = musigma::batch_norm::forward_op().call(x, weight, bias, eps, add, activation);
  }
  return wrap(std::move(results));
  END_HANDLE_TH_ERRORS
}

PyObject* affine(PyObject*, PyObject* const* values, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Arguments a(values, count, 9);
  const Tensor x = a.tensor(0), mean = a.tensor(1), var = a.tensor(2);
  const MaybeTensor weight = a.maybe(3), bias = a.maybe(4);
  const double eps = a.number(5);
  const MaybeTensor add = a.maybe(6);
  const musigma::Name activation = a.text(7);
  const MaybeTensor mask = a.maybe(8);
  if (!a.plain) return through_op("affine", values, count);
  Tensor y;
  {
    py::gil_scoped_release release;
    y = musigma::affine::forward_op().call(x, mean, var, weight, bias, eps, add, activation, mask);
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

// All of a batch_norm layer in one call, for arguments that are plain and right; None for every other call, which
// Python then looks at, and refuses or takes apart. (Its checks and glue take twice as long as a small tensor's arithmetic.)
PyObject* batch_norm_layer(PyObject*, PyObject* const* values, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Arguments a(values, count, 11);
  musigma::layer::Call call{a.tensor(0), a.maybe(1), a.maybe(2), a.maybe(3), a.maybe(4), a.maybe(5)};
  call.training = a.flag(6);
  if (values[7] != Py_None) call.momentum = a.number(7);
  call.eps = a.number(8);
  call.add = a.maybe(9);
  call.activation = a.text(10);
  if (!a.plain || at::tracer::impl::is_dispatch_enabled() || !musigma::layer::right(call)) Py_RETURN_NONE;
  Tensor y;
  {
    py::gil_scoped_release release;
    y = musigma::layer::run(call);
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

PyObject* enable(PyObject*, PyObject* on) {
  HANDLE_TH_ERRORS
  musigma::enabled = on == Py_True;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* set_cache_limit(PyObject*, PyObject* bytes) {
  HANDLE_TH_ERRORS
  const size_t limit = PyLong_AsSize_t(bytes);
  if (PyErr_Occurred()) throw python_error();
  musigma::set_cache_limit(limit);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* empty_cache(PyObject*, PyObject*) {
  musigma::empty_cache();
  Py_RETURN_NONE;
}

PyObject* memory_cached(PyObject*, PyObject*) { return PyLong_FromSize_t(musigma::memory_cached()); }

bool is_taken(const Tensor& t) {
  musigma::DType type;
  // A trace is for a process that may not have these kernels.
  return t.is_cpu() && t.layout() == at::kStrided && musigma::storage_type(t, type) &&
         !at::tracer::impl::is_dispatch_enabled();
}

PyObject* takes(PyObject*, PyObject* x) {
  return PyBool_FromLong(THPVariable_CheckExact(x) && is_taken(THPVariable_Unpack(x)));
}

// layer_norm and rms_norm as their users call them, in one step where everything about the call is plain and right;
// None sends it back to Python, which knows the rest: other layouts, single values, refusals and their reasons.
struct PlainRows {
  const MaybeTensor weight, bias;
  const double eps;
  const bool center;
  const musigma::Name activation;
  int64_t n_dims = 0;
  bool plain;

  PlainRows(Arguments& a, int i, const Tensor& x)
      : weight(a.maybe(i + 1)), bias(a.maybe(i + 2)), eps(a.number(i + 3)), center(a.flag(i + 4)),
        activation(a.text(i + 5)), plain(a.plain && musigma::enabled && is_taken(x) && fits(x, a.values[i])) {}

 private:
  bool fits(const Tensor& x, PyObject* shape) {
    musigma::Activation kind;
    if (!PyTuple_Check(shape) || !(eps >= 0) || !musigma::activation_of(activation, kind)) return false;
    n_dims = PyTuple_GET_SIZE(shape);
    if (n_dims < 1 || n_dims > x.dim() || (x.dim() > 3 && !x.is_contiguous())) return false;
    const auto row = x.sizes().slice(x.dim() - n_dims);
    int64_t width = 1;
    for (int64_t d = 0; d < n_dims; d++) {
      PyObject* size = PyTuple_GET_ITEM(shape, d);
      if (!PyLong_CheckExact(size) || PyLong_AsLongLong(size) != row[d]) return PyErr_Clear(), false;
      width *= row[d];
    }
    return width > 1 && musigma::is_parameter(weight, row) && musigma::is_parameter(bias, row);
  }
};

PyObject* plain_rows(PyObject*, PyObject* const* values, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Arguments a(values, count, 7);
  const Tensor x = a.tensor(0);
  if (!a.plain) Py_RETURN_NONE;
  const PlainRows r(a, 1, x);
  if (!r.plain) Py_RETURN_NONE;
  Tensor y;
  {
    py::gil_scoped_release release;
    y = std::get<0>(
        musigma::row_norm::forward_op().call(x, r.n_dims, r.weight, r.bias, r.eps, r.center, r.activation));
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

PyObject* plain_add_rows(PyObject*, PyObject* const* values, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Arguments a(values, count, 8);
  const Tensor x = a.tensor(0), residual = a.tensor(1);
  if (!a.plain || !musigma::is_like(residual, x)) Py_RETURN_NONE;
  const PlainRows r(a, 2, x);
  if (!r.plain) Py_RETURN_NONE;
  std::tuple<Tensor, Tensor> results;
  {
    py::gil_scoped_release release;
    auto [y, sum, mean, rstd] = musigma::add_row_norm::forward_op().call(
        x, residual, r.n_dims, r.weight, r.bias, r.eps, r.center, r.activation);
    results = {std::move(y), std::move(sum)};
  }
  return wrap(std::move(results));
  END_HANDLE_TH_ERRORS
}

PyObject* level(PyObject*, PyObject*) { return PyUnicode_FromString(musigma::kernels().level); }

PyObject* levels(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  musigma::Level found[musigma::kMaxLevels];
  const int count = musigma::levels(found);
  py::dict result;
  for (int i = 0; i < count; i++) result[found[i].kernels->level] = found[i].runs;
  return result.release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* use_level(PyObject*, PyObject* name) {
  HANDLE_TH_ERRORS
  const char* level = PyUnicode_AsUTF8(name);
  if (!level) return nullptr;
  return PyBool_FromLong(musigma::use_level(level));
  END_HANDLE_TH_ERRORS
}

template <class F>
PyCFunction fast(F f) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(f));
}

PyMethodDef methods[] = {
    {"row_norm", fast(row_norm), METH_FASTCALL,
     "(x, n_dims, weight, bias, eps, center, activation) -> (y, mean, rstd)"},
    {"add_row_norm", fast(add_row_norm), METH_FASTCALL,
     "(x, residual, n_dims, weight, bias, eps, center, activation) -> (y, sum, mean, rstd)"},
    {"group_norm", fast(group_norm), METH_FASTCALL, "(x, groups, weight, bias, eps, activation) -> (y, mean, m2)"},
    {"batch_norm", fast(batch_norm), METH_FASTCALL, "(x, weight, bias, eps, add, activation) -> (y, mean, m2)"},
    {"affine", fast(affine), METH_FASTCALL,
     "(x, mean, var, weight, bias, eps, add, activation, mask) -> y"},
    {"batch_norm_layer", fast(batch_norm_layer), METH_FASTCALL,
     "(x, running_mean, running_var, num_batches_tracked, weight, bias, training, momentum, eps, add, activation)"
     " -> y or None"},
    {"plain_rows", fast(plain_rows), METH_FASTCALL,
     "(x, normalized_shape, weight, bias, eps, center, activation) -> y, or None where row_norm is not all"},
    {"plain_add_rows", fast(plain_add_rows), METH_FASTCALL,
     "(x, residual, normalized_shape, weight, bias, eps, center, activation) -> (y, sum), or None likewise"},
    {"takes", takes, METH_O, "(x) -> bool: whether the kernels take this tensor"},
    {"enable", enable, METH_O, "(on) -> None: whether the kernels or the references run"},
    {"set_cache_limit", set_cache_limit, METH_O, "(bytes) -> None: how much memory of freed results is kept"},
    {"empty_cache", empty_cache, METH_NOARGS, "() -> None: gives back what is kept"},
    {"memory_cached", memory_cached, METH_NOARGS, "() -> int: bytes kept"},
    {"level", level, METH_NOARGS, "() -> str: the CPU level that was chosen"},
    {"levels", levels, METH_NOARGS, "() -> dict: the levels there are, the lowest first, and whether this CPU runs them"},
    {"use_level", use_level, METH_O, "(level) -> bool: whether it could be chosen"},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() {
  try {
    add_kernels();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_ImportError, error.what());
    return nullptr;
  }
  return PyModule_Create(&definition);
}

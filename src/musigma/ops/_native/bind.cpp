// The only source that knows torch: the ops' CPU and autograd kernels, and their entry from Python.
#include "../_add_row_norm/bind.h"
#include "../_moments/bind.h"
#include "calls.h"

#define MUSIGMA_ENTRIES(each) each(row_norm) each(add_row_norm) each(group_norm) each(batch_norm) each(affine)
#define MUSIGMA_OPS(each) MUSIGMA_ENTRIES(each) each(moments)
#define MUSIGMA_CALLS(each) \
  each(layer_norm) each(rms_norm) each(add_layer_norm) each(add_rms_norm) each(group_norm) each(batch_norm)

namespace {

// Not by TORCH_LIBRARY_IMPL: what that raises, about a schema that has changed since the build, ends the process.
void add_kernels() {
  const auto library = [](c10::DispatchKey key) {
    return std::make_unique<torch::Library>(torch::Library::IMPL, "musigma", key, __FILE__, __LINE__);
  };
  auto cpu = library(c10::DispatchKey::CPU), autograd = library(c10::DispatchKey::AutogradCPU);
#define MUSIGMA_ADD(name)                                 \
  cpu->impl(#name, musigma::name::forward);               \
  cpu->impl(#name "_backward", musigma::name::backward);  \
  autograd->impl(#name, musigma::name::forward_autograd); \
  autograd->impl(#name "_backward", musigma::name::backward_autograd);
  MUSIGMA_OPS(MUSIGMA_ADD)
  cpu->impl("running_update_", musigma::running::update);
  autograd->impl("running_update_", torch::CppFunction::makeFallthrough());
  // All or none; and as long as the process lives.
  cpu.release(), autograd.release();
}

// An op as a Python function: what it takes, in the same order, to what it returns.
template <auto& op>
PyObject* entry(PyObject*, PyObject* const* values, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  return musigma::enter(op(), values, count);
  END_HANDLE_TH_ERRORS
}

// A function of ms.functional.
template <PyObject* (*call)(PyObject* const*, Py_ssize_t)>
PyObject* called(PyObject*, PyObject* const* values, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  return call(values, count);
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

PyObject* takes(PyObject*, PyObject* x) {
  return PyBool_FromLong(THPVariable_CheckExact(x) && musigma::calls::taken(THPVariable_Unpack(x)));
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
#define MUSIGMA_ENTRY(name) {#name, fast(entry<musigma::name::forward_op>), METH_FASTCALL, "the op, positionally"},
    MUSIGMA_ENTRIES(MUSIGMA_ENTRY)
#define MUSIGMA_CALL(name)                                           \
  {"call_" #name, fast(called<musigma::calls::name>), METH_FASTCALL, \
   "ms.functional's arguments, positionally -> its result, or None: not a plain call"},
        MUSIGMA_CALLS(MUSIGMA_CALL){"takes", takes, METH_O, "(x) -> bool: whether the kernels take this tensor"},
    {"enable", enable, METH_O, "(on) -> None: whether the kernels or the references run"},
    {"set_cache_limit", set_cache_limit, METH_O, "(bytes) -> None: how much memory of freed results is kept"},
    {"empty_cache", empty_cache, METH_NOARGS, "() -> None: gives back what is kept"},
    {"memory_cached", memory_cached, METH_NOARGS, "() -> int: bytes kept"},
    {"level", level, METH_NOARGS, "() -> str: the CPU level that was chosen"},
    {"levels", levels, METH_NOARGS,
     "() -> dict: the levels there are, the lowest first, and whether this CPU runs them"},
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

// From Python's arguments to an op and back: what torch.ops does, without its schema parser, which costs more than a
// small tensor's arithmetic.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/utils/pybind.h>

#include "tensors.h"

namespace musigma {

// Arguments by position. One that is not plain (a tensor subclass, a mode that listens, a wrong type) clears `plain`.
struct Arguments {
  PyObject* const* values;
  bool plain;

  Arguments(PyObject* const* values, Py_ssize_t count, Py_ssize_t expected)
      : values(values), plain(count == expected && !at::impl::torch_function_mode_enabled()) {}

  template <class T>
  T get(size_t i) {
    PyObject* value = plain ? values[i] : Py_None;  // there may be fewer than expected
    if constexpr (std::is_same_v<T, Tensor>) {
      if (!plain || !THPVariable_CheckExact(value)) return plain = false, Tensor();
      return THPVariable_Unpack(value);
    } else if constexpr (std::is_same_v<T, int64_t>) {
      if (!plain || !PyLong_Check(value)) return plain = false, 0;
      return checked<int64_t>(PyLong_AsLongLong(value));
    } else if constexpr (std::is_same_v<T, double>) {
      if (!plain || !(PyFloat_Check(value) || PyLong_Check(value))) return plain = false, 0;
      return checked(PyFloat_AsDouble(value));
    } else if constexpr (std::is_same_v<T, bool>) {
      if (!plain || !PyBool_Check(value)) return plain = false, false;
      return value == Py_True;
    } else if constexpr (std::is_same_v<T, std::string_view>) {
      if (!plain || !PyUnicode_Check(value)) return plain = false, T();
      Py_ssize_t size = 0;
      const char* characters = PyUnicode_AsUTF8AndSize(value, &size);
      if (!characters) return PyErr_Clear(), plain = false, T();
      return {characters, (size_t)size};
    } else {  // std::optional of one of the above
      if (!plain || value == Py_None) return std::nullopt;
      return get<typename T::value_type>(i);
    }
  }

 private:
  // What C++ can't hold is the dispatcher's to refuse.
  template <class T>
  T checked(T value) {
    if (value == T(-1) && PyErr_Occurred()) PyErr_Clear(), plain = false;
    return value;
  }
};

inline PyObject* wrap(Tensor&& result) { return THPVariable_Wrap(std::move(result)); }

template <class... T>
PyObject* wrap(std::tuple<T...>&& results) {
  PyObject* tuple = PyTuple_New(sizeof...(T));
  if (!tuple) throw python_error();
  Py_ssize_t i = 0;
  std::apply([&](auto&&... t) { (PyTuple_SET_ITEM(tuple, i++, wrap(std::move(t))), ...); }, std::move(results));
  return tuple;
}

template <class Result, class... T>
PyObject* enter(const c10::TypedOperatorHandle<Result(T...)>& op, PyObject* const* values, Py_ssize_t count) {
  Arguments from(values, count, sizeof...(T));
  const auto arguments = [&]<size_t... I>(std::index_sequence<I...>) {
    return std::tuple<std::decay_t<T>...>{from.get<std::decay_t<T>>(I)...};  // braces: in order
  }(std::index_sequence_for<T...>{});
  if (!from.plain) {
    // The op itself says what is wrong, or knows what to do.
    py::object through = py::module_::import("torch").attr("ops");
    for (const char* name : {"musigma", op.operator_name().name.c_str() + sizeof("musigma:"), "default"})
      through = through.attr(name);
    return PyObject_Vectorcall(through.ptr(), values, count, nullptr);
  }
  Result result = [&] {
    py::gil_scoped_release release;
    return std::apply([&](const auto&... value) { return op.call(value...); }, arguments);
  }();
  return wrap(std::move(result));
}

}  // namespace musigma

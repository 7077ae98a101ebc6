// The norms of ms.functional in one call, where nothing is unusual about their arguments; for all others None, and Python
// goes through them one by one and words what is wrong with them. That takes as long as a small tensor's norm.
#pragma once

#include <ATen/TracerMode.h>

#include <cfloat>

#include "../_add_row_norm/bind.h"
#include "../_affine/bind.h"
#include "../_batch_norm/bind.h"
#include "../_group_norm/bind.h"
#include "../_row_norm/bind.h"
#include "../_running/bind.h"
#include "python.h"

namespace musigma::calls {

// Whether the kernels take a tensor, as `selected` asks.
inline bool taken(const Tensor& x) {
  DType type;
  // A trace is for a process that may not have these kernels.
  return x.is_cpu() && x.layout() == at::kStrided && storage_type(x, type) && !at::tracer::impl::is_dispatch_enabled();
}

inline bool plain(const Tensor& x) { return enabled && taken(x) && x.numel() > 0; }

inline bool known(const Name& activation) {
  Activation kind;
  return activation_of(activation, kind);
}

template <class F>
PyObject* unlocked(F f) {
  auto result = [&] {
    py::gil_scoped_release release;
    return f();
  }();
  return wrap(std::move(result));
}

// Whether x ends in the sizes that a tuple or a list holds, more than one value of them; and how many there are.
inline bool ends_in(const Tensor& x, PyObject* shape, int64_t& n_dims) {
  if (!PyTuple_Check(shape) && !PyList_Check(shape)) return false;
  n_dims = PySequence_Fast_GET_SIZE(shape);
  if (n_dims < 1 || n_dims > x.dim()) return false;
  PyObject** items = PySequence_Fast_ITEMS(shape);
  int64_t count = 1;
  for (int64_t d = 0; d < n_dims; d++) {
    if (!PyLong_CheckExact(items[d])) return false;
    const int64_t size = x.size(x.dim() - n_dims + d);
    if (PyLong_AsLongLong(items[d]) != size) return PyErr_Clear(), false;
    count *= size;
  }
  return count > 1;
}

// What the norms of rows share, from argument `i` on: (normalized_shape, weight, bias if centered, eps).
struct Rows {
  MaybeTensor weight, bias;
  double eps = 0;
  int64_t n_dims = 0;
  bool right = false;

  Rows(Arguments& a, int i, bool center, const Tensor& x, PyObject* mask, const Name& activation) {
    if (!a.plain) return;
    PyObject* shape = a.values[i++];
    weight = a.get<MaybeTensor>(i++);
    if (center) bias = a.get<MaybeTensor>(i++);
    eps = center ? a.get<double>(i) : a.get<std::optional<double>>(i).value_or(FLT_EPSILON);
    if (!a.plain || mask != Py_None || !plain(x) || !(eps >= 0) || !known(activation)) return;
    if (!ends_in(x, shape, n_dims)) return;
    const auto row = x.sizes().slice(x.dim() - n_dims);
    // An image's result takes another memory format than these kernels give it.
    right = is_parameter(weight, row) && is_parameter(bias, row) && (x.dim() <= 3 || x.is_contiguous());
  }
};

inline PyObject* norm(PyObject* const* values, Py_ssize_t count, bool center) {
  const int last = center ? 6 : 5;
  Arguments a(values, count, last + 1);
  const Tensor x = a.get<Tensor>(0);
  const Name activation = a.get<Name>(last);
  const Rows r(a, 1, center, x, a.plain ? values[last - 1] : nullptr, activation);
  if (!r.right) Py_RETURN_NONE;
  return unlocked([&] {
    return std::get<0>(row_norm::forward_op().call(x, r.n_dims, r.weight, r.bias, r.eps, center, activation));
  });
}

inline PyObject* add_norm(PyObject* const* values, Py_ssize_t count, bool center) {
  const int last = center ? 6 : 5;
  Arguments a(values, count, last + 1);
  const Tensor x = a.get<Tensor>(0), residual = a.get<Tensor>(1);
  const Name activation = a.get<Name>(last);
  const Rows r(a, 2, center, x, Py_None, activation);
  if (!r.right || !is_like(residual, x)) Py_RETURN_NONE;
  return unlocked([&] {
    auto [y, sum, mean, rstd] =
        add_row_norm::forward_op().call(x, residual, r.n_dims, r.weight, r.bias, r.eps, center, activation);
    return std::tuple<Tensor, Tensor>{std::move(y), std::move(sum)};
  });
}

// (input, normalized_shape, weight, bias, eps, mask, activation)
inline PyObject* layer_norm(PyObject* const* values, Py_ssize_t count) { return norm(values, count, true); }
// (input, normalized_shape, weight, eps, mask, activation)
inline PyObject* rms_norm(PyObject* const* values, Py_ssize_t count) { return norm(values, count, false); }
// (x, residual, normalized_shape, weight, bias, eps, activation)
inline PyObject* add_layer_norm(PyObject* const* values, Py_ssize_t count) { return add_norm(values, count, true); }
// (x, residual, normalized_shape, weight, eps, activation)
inline PyObject* add_rms_norm(PyObject* const* values, Py_ssize_t count) { return add_norm(values, count, false); }

inline bool is_vector(const MaybeTensor& v, const Tensor& x) {
  return is_parameter(v, x.sizes().slice(1, 1)) && readable(v);
}

// (input, num_groups, weight, bias, eps, mask, activation)
inline PyObject* group_norm(PyObject* const* values, Py_ssize_t count) {
  Arguments a(values, count, 7);
  const Tensor x = a.get<Tensor>(0);
  const int64_t groups = a.get<int64_t>(1);
  const MaybeTensor weight = a.get<MaybeTensor>(2), bias = a.get<MaybeTensor>(3);
  const double eps = a.get<double>(4);
  const Name activation = a.get<Name>(6);
  if (!a.plain || values[5] != Py_None || !plain(x) || x.dim() < 2 || !(eps >= 0) || !known(activation)) Py_RETURN_NONE;
  if (groups < 1 || x.size(1) % groups || x.numel() == x.size(0) * groups) Py_RETURN_NONE;
  if (!is_vector(weight, x) || !is_vector(bias, x)) Py_RETURN_NONE;
  return unlocked(
      [&] { return std::get<0>(musigma::group_norm::forward_op().call(x, groups, weight, bias, eps, activation)); });
}

// A running statistic that the update can write, or evaluation read.
inline bool is_running(const MaybeTensor& v, const Tensor& x) {
  return v && v->sizes() == x.sizes().slice(1, 1) && running::float_vector(*v);
}

// No value below `low`, none above what the type holds, and nothing that is no number: statistics that can't be are told
// of, and looking at a few hundred takes no time beside asking what is known of them.
template <class T>
bool within(const T* values, int64_t n, T low) {
  int bad = 0;
  for (int64_t c = 0; c < n; c++) bad += !((values[c] >= low) & (values[c] <= std::numeric_limits<T>::max()));
  return bad == 0;
}
template <class T>
bool possible(const Tensor& mean, const Tensor& var) {
  return within<T>(mean.const_data_ptr<T>(), mean.numel(), std::numeric_limits<T>::lowest()) &&
         within<T>(var.const_data_ptr<T>(), var.numel(), 0);
}
inline bool possible(const Tensor& mean, const Tensor& var) {
  if (mean.scalar_type() != var.scalar_type()) return false;
  return mean.scalar_type() == at::kFloat ? possible<float>(mean, var) : possible<double>(mean, var);
}

// (input, running_mean, running_var, weight, bias, training, momentum, eps, num_batches_tracked, mask, group, add,
// activation)
inline PyObject* batch_norm(PyObject* const* values, Py_ssize_t count) {
  Arguments a(values, count, 13);
  const Tensor x = a.get<Tensor>(0);
  MaybeTensor mean = a.get<MaybeTensor>(1), var = a.get<MaybeTensor>(2);
  const MaybeTensor weight = a.get<MaybeTensor>(3), bias = a.get<MaybeTensor>(4);
  const bool training = a.get<bool>(5);
  const auto momentum = a.get<std::optional<double>>(6);
  const double eps = a.get<double>(7);
  const MaybeTensor tracked = a.get<MaybeTensor>(8), add = a.get<MaybeTensor>(11);
  const Name activation = a.get<Name>(12);
  if (!a.plain || values[9] != Py_None || values[10] != Py_None || !plain(x) || x.dim() < 2 || !known(activation) ||
      !is_vector(weight, x) || !is_vector(bias, x) || !is_add(add, x) ||
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode))
    Py_RETURN_NONE;
  if (mean.has_value() != var.has_value() || (mean && !(is_running(mean, x) && is_running(var, x)))) Py_RETURN_NONE;
  if (!training) {
    if (!mean || !(eps >= 0) || !possible(*mean, *var)) Py_RETURN_NONE;
    return unlocked(
        [&] { return affine::forward_op().call(x, *mean, *var, weight, bias, eps, add, activation, std::nullopt); });
  }
  const int64_t each = x.numel() / x.size(1);
  if (!(eps > 0) || each < 2 || (mean && !momentum && !tracked)) Py_RETURN_NONE;
  return unlocked([&] {
    auto [y, batch_mean, m2] = musigma::batch_norm::forward_op().call(x, weight, bias, eps, add, activation);
    if (mean) {
      Tensor n = output({}, at::kDouble);
      *n.mutable_data_ptr<double>() = (double)each;
      running::op().call(*mean, *var, tracked, n, batch_mean, m2, momentum);
    }
    return y;
  });
}

}  // namespace musigma::calls

// How an op records itself for autograd: one kind of node for all ops, which tell it what they save and how to go back.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/library.h>

#include <array>
#include <tuple>

namespace musigma {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using MaybeTensor = std::optional<Tensor>;

inline const Tensor& tensor(const Tensor& t) { return t; }
inline Tensor tensor(const MaybeTensor& t) { return t.value_or(Tensor()); }
inline MaybeTensor maybe(const Tensor& t) { return t.defined() ? MaybeTensor(t) : std::nullopt; }

// A dispatcher op, looked up once.
template <class Signature>
c10::TypedOperatorHandle<Signature> op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Forward AD has no rule of ours: the differentiable reference carries tangents.
template <class... T>
bool has_tangent(const T&... tensors) {
  auto one = [](const Tensor& t) { return t.defined() && t._fw_grad(0).defined(); };
  return (one(tensor(tensors)) || ...);
}

template <class... T>
bool requires_grad(const T&... tensors) {
  if (!at::GradMode::is_enabled()) return false;
  auto one = [](const Tensor& t) { return t.defined() && t.requires_grad(); };
  return (one(tensor(tensors)) || ...);
}

// The node of one call. Op says
//   kName, kInputs    the node's name, and how many inputs can get a gradient
//   kSaved            how many tensors it keeps (undefined ones count)
//   Plain             a std::tuple of the arguments that are no tensors
//   backward(grads, saved, plain, needs) -> one gradient an input, undefined where not needed
template <class Op>
struct Recorded final : Node {
  std::array<SavedVariable, Op::kSaved> saved;
  std::array<bool, Op::kSaved> own{};  // which of them are outputs of this very node
  typename Op::Plain plain;

  std::string name() const override { return Op::kName; }

  void release_variables() override {
    for (auto& s : saved) s.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    bool any = false;
    for (const auto& g : grads) any = any || g.defined();
    if (!any) return variable_list(Op::kInputs);
    const auto self = c10::intrusive_ptr<Node>::reclaim_copy(this);
    std::array<Tensor, Op::kSaved> tensors;
    for (int i = 0; i < Op::kSaved; i++) tensors[i] = saved[i].unpack(self);
    std::array<bool, Op::kInputs> needs;
    for (int i = 0; i < Op::kInputs; i++) needs[i] = task_should_compute_output(i);
    return Op::backward(grads, tensors, plain, needs);
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    for (int i = 0; i < Op::kSaved; i++) args.collect(saved[i], own[i]);
    std::apply([&](const auto&... value) { (args.collect(value), ...); }, plain);
  }

  variable_list apply_with_saved(
      const variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& swap) override {
    for (auto& s : saved) swap.before(s);
    variable_list result = apply(variable_list(grads));
    for (auto& s : saved) swap.after(s);
    return result;
  }
};

// Runs `call` below autograd, and where an input requires a gradient records a node behind the outputs it returns as
// differentiable(result). `save(result)` gives the tensors to keep.
template <class Op, class Call, class Save, class Outputs, class... Inputs>
auto record(Call call, typename Op::Plain plain, Save save, Outputs outputs, const Inputs&... inputs) {
  c10::intrusive_ptr<Recorded<Op>> node;
  if (requires_grad(inputs...)) {
    node = c10::make_intrusive<Recorded<Op>>();
    node->set_next_edges(torch::autograd::collect_next_edges(tensor(inputs)...));
    node->plain = std::move(plain);
  }
  auto result = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return call();
  }();
  if (node) {
    for (Tensor* out : outputs(result)) torch::autograd::set_history(*out, node);
    const std::array<Tensor, Op::kSaved> kept = save(result);
    for (int i = 0; i < Op::kSaved; i++) {
      if (!kept[i].defined()) continue;
      // A node that held its own output would hold itself.
      node->own[i] = kept[i].grad_fn() == node;
      node->saved[i] = SavedVariable(kept[i], node->own[i]);
    }
  }
  return result;
}

}  // namespace musigma

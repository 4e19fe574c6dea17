// What the kernels' torch operators share. Their autograd is in C++: through Python a norm layer spends as long on the way into
// the kernel as in it.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/FuncTorchTLS.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// at::empty without the dispatcher
Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) { return at::detail::empty_cpu(sizes, dtype); }

template <class T = void> T* data(const Tensor& t) { return t.defined() ? static_cast<T*>(t.data_ptr()) : nullptr; }

void refuse_transforms(std::initializer_list<Maybe> inputs, const char* whose, const char* setting) {
    if (const auto& functorch = at::functorch::functorchTLSAccessor()) functorch->checkSupportsCppAutogradFunction();
    for (const Maybe& t : inputs)
        TORCH_CHECK(!torch::autograd::isFwGradDefined(t), "no forward-mode derivative of ", whose, ": ", setting, " has one");
}

// torch::autograd::Function would do the same, but takes longer than the kernel does on a small tensor. The price: this needs
// a torch whose nodes are intrusive_ptr, and compiled autograd does not know it.
template <int N> struct KernelNode : torch::autograd::Node {
    std::array<SavedVariable, N> kept;

    void refuse_second_derivative(const char* whose, const char* setting) const {
        TORCH_CHECK(!at::GradMode::is_enabled(), "the backward pass of ", whose, " cannot be differentiated again: "
                    "create_graph=True needs ", setting);
    }

    void release_variables() override {
        std::lock_guard<std::mutex> lock(mutex_);
        for (SavedVariable& saved : kept) saved.reset_data();
    }
};

}  // namespace

// ln_kernel.cpp as torch operators, with their autograd in C++: through Python a norm layer spends as long on the way into
// the kernel as in it. build.py compiles both files into one library; ln_kernel.py says what the arguments mean.

#include <ATen/EmptyTensor.h>
#include <ATen/FuncTorchTLS.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

extern "C" void norm_forward(const void* x, const void* branch, void* sum, const float* w, const float* b, void* y,
                             float* stats, int64_t rows, int64_t C, float eps, int rms, int dtypes, int threads);
extern "C" void norm_backward(const void* dy, const void* ds, const void* x, const float* w, const float* stats,
                              const float* metric, void* dx, float* dw, float* db, float* sq, int64_t B, int64_t T, int64_t C,
                              int rms, int dtypes, int threads);
extern "C" void norm_tap(const void* dy, const void* x, float* rows, int64_t B, int64_t T, int64_t C, float eps, int rms,
                         int bias, int dtypes, int threads);

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// The usual case first: calls are short, and each operation on the way counts.
Tensor as_float(const Maybe& t) {
    if (!t) return Tensor();
    return t->scalar_type() == at::kFloat && t->is_contiguous() ? *t : t->to(at::kFloat).contiguous();
}

Tensor as_dtype(const Tensor& t, at::ScalarType dtype) { return !t.defined() || t.scalar_type() == dtype ? t : t.to(dtype); }

template <class T = void> T* data(const Tensor& t) { return t.defined() ? static_cast<T*>(t.data_ptr()) : nullptr; }

// at::empty without the dispatcher
Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) { return at::detail::empty_cpu(sizes, dtype); }

// Below, waking a thread costs more than it saves.
int threads_for(const Tensor& x) { return x.numel() >= 32768 ? at::get_num_threads() : 1; }

int dtypes_of(at::ScalarType x, at::ScalarType y) {
    TORCH_CHECK((x == at::kFloat && (y == at::kFloat || y == at::kBFloat16)) || (x == at::kBFloat16 && y == x),
                "no norm kernel from ", x, " to ", y);
    return x == at::kBFloat16 ? 2 : y == at::kBFloat16;
}

struct Forward { Tensor sum, y, stats; };   // sum: undefined without a branch

Forward run_forward(const Tensor& input, const Maybe& branch, const Tensor& weight, const Maybe& bias, double eps, bool rms,
                    at::ScalarType dtype) {
    for (const Tensor& t : {input, weight, branch.value_or(input)})
        TORCH_CHECK(!t.key_set().has(c10::DispatchKey::Python), "the cpu norm kernel needs plain tensors with memory");
    TORCH_CHECK(input.numel() > 0, "a norm layer got an empty tensor of shape ", input.sizes());
    const Tensor x = input.contiguous(), w = as_float(weight), b = as_float(bias);
    const Tensor r = branch ? branch->contiguous() : Tensor();
    TORCH_CHECK(!branch || (r.scalar_type() == dtype && r.sizes() == x.sizes()), "the branch needs x's shape and y's dtype");
    const int64_t C = x.size(-1), rows = x.numel() / C;
    Tensor y = empty(x.sizes(), dtype), stats = empty({rms ? 1 : 2, rows}), sum;
    if (branch) sum = empty(x.sizes(), x.scalar_type());
    norm_forward(data(x), data(r), data(sum), data<float>(w), data<float>(b), data(y), data<float>(stats), rows, C, eps, rms,
                 dtypes_of(x.scalar_type(), dtype), threads_for(x));
    return {sum, y, stats};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> run_backward(const Tensor& dout, const Tensor& dsum, const Tensor& input,
                                                        const Tensor& weight, const Tensor& stats, const Maybe& metric,
                                                        bool rms, bool has_bias, bool tracked) {
    const Tensor dy = dout.contiguous(), x = input.contiguous(), w = as_float(weight), p = as_float(metric);
    const Tensor ds = dsum.defined() ? dsum.contiguous() : dsum;
    const int64_t B = x.size(0), C = x.size(-1), T = stats.size(1) / B;
    Tensor dx = empty(x.sizes(), x.scalar_type()), dw = empty(C), db, sq;
    if (has_bias) db = empty(C);
    if (tracked) sq = empty({(rms ? 1 : 2) * (p.defined() ? 2 : 1), B});
    norm_backward(data(dy), data(ds), data(x), data<float>(w), data<float>(stats), data<float>(p), data(dx), data<float>(dw),
                  data<float>(db), data<float>(sq), B, T, C, rms, dtypes_of(x.scalar_type(), dy.scalar_type()),
                  threads_for(x));
    return {dx, as_dtype(dw, weight.scalar_type()), as_dtype(db, weight.scalar_type()), sq};
}

// torch::autograd::Function would do the same, but takes longer than the kernel does on a small tensor. The price: this needs
// a torch whose nodes are intrusive_ptr, and compiled autograd does not know it.
struct NormBackward : torch::autograd::Node {
    SavedVariable x, weight, stats, metric;   // x: what was normalised
    bool after_branch, rms, has_bias, tracked;

    // gradients of y and, after a branch, of x + branch -> of x, branch, weight, bias, probe
    variable_list apply(variable_list&& grads) override {
        TORCH_CHECK(!at::GradMode::is_enabled(), "the norm layers' backward pass cannot be differentiated again: "
                    "create_graph=True needs norm_impl='torch'");
        std::lock_guard<std::mutex> lock(mutex_);
        const Tensor ds = after_branch ? grads[1] : Tensor();
        if (!grads[0].defined()) return {ds, ds, Tensor(), Tensor(), Tensor()};   // y was not used
        // under activation checkpointing, this runs the forward pass again
        const Tensor kept = x.unpack(getptr()), w = weight.unpack(), p = metric.unpack();
        auto [dx, dw, db, sq] = run_backward(grads[0], ds, kept, w, stats.unpack(), p.defined() ? Maybe(p) : std::nullopt, rms,
                                             has_bias, tracked);
        return {dx, after_branch ? dx : Tensor(), dw, db, sq};   // autograd casts to the branch's dtype
    }

    void release_variables() override {
        std::lock_guard<std::mutex> lock(mutex_);
        for (SavedVariable* saved : {&x, &weight, &stats, &metric}) saved->reset_data();
    }

    std::string name() const override { return "NormBackward"; }
};

struct Output { Tensor sum, y; };

Output apply(const Tensor& x, const Maybe& branch, const Tensor& weight, const Maybe& bias, const Maybe& probe,
             const Maybe& metric, double eps, bool rms) {
    using namespace torch::autograd;
    if (const auto& functorch = at::functorch::functorchTLSAccessor()) functorch->checkSupportsCppAutogradFunction();
    for (const Maybe& t : {Maybe(x), branch, Maybe(weight), bias})
        TORCH_CHECK(!isFwGradDefined(t), "the norm layers have no forward-mode derivative: norm_impl='torch' has one");
    const bool autocast = at::autocast::is_autocast_enabled(at::kCPU);
    const at::ScalarType dtype = autocast ? at::autocast::get_autocast_dtype(at::kCPU) : x.scalar_type();
    const auto forward = [&] {
        at::AutoDispatchBelowADInplaceOrView below;
        return run_forward(x, branch, weight, bias, eps, rms, dtype);
    };
    if (!compute_requires_grad(x, branch, weight, bias, probe)) {
        const auto [sum, y, stats] = forward();
        return {sum, y};
    }
    const auto node = c10::make_intrusive<NormBackward>();
    node->set_next_edges(collect_next_edges(x, branch, weight, bias, probe));
    auto [sum, y, stats] = forward();
    set_history(y, node);
    if (branch) set_history(sum, node);
    node->x = SavedVariable(branch ? sum : x, branch.has_value());
    node->weight = SavedVariable(weight, false);
    node->stats = SavedVariable(stats, false);
    node->metric = SavedVariable(metric, false);
    node->after_branch = branch.has_value();
    node->rms = rms;
    node->has_bias = bias.has_value();
    node->tracked = probe.has_value();
    return {sum, y};
}

Tensor norm(const Tensor& x, const Tensor& weight, const Maybe& bias, const Maybe& probe, const Maybe& metric, double eps,
            bool rms) {
    return apply(x, Maybe(), weight, bias, probe, metric, eps, rms).y;
}

std::tuple<Tensor, Tensor> add_norm(const Tensor& x, const Tensor& branch, const Tensor& weight, const Maybe& bias,
                                    const Maybe& probe, const Maybe& metric, double eps, bool rms) {
    const auto [sum, y] = apply(x, branch, weight, bias, probe, metric, eps, rms);
    return {sum, y};
}

std::tuple<Tensor, Tensor> forward(const Tensor& x, const Tensor& weight, const Maybe& bias, double eps, bool rms,
                                   at::ScalarType dtype) {
    const auto [sum, y, stats] = run_forward(x, Maybe(), weight, bias, eps, rms, dtype);
    return {y, stats};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                                    const Tensor& stats, const Maybe& metric, bool rms, bool has_bias,
                                                    bool tracked) {
    return run_backward(dy, Tensor(), x, weight, stats, metric, rms, has_bias, tracked);
}

Tensor tap(const Tensor& dout, const Tensor& input, double eps, bool rms, bool bias) {
    const Tensor dy = dout.contiguous(), x = input.contiguous();
    TORCH_CHECK(x.numel() > 0 && x.sizes() == dy.sizes(), "a tap needs x and dy of one shape, got ", x.sizes(), " and ",
                dy.sizes());
    const int64_t B = x.size(0), C = x.size(-1), T = x.numel() / (B * C);
    Tensor rows = empty({B, (bias ? 2 : 1) * C});
    norm_tap(data(dy), data(x), data<float>(rows), B, T, C, eps, rms, bias, dtypes_of(x.scalar_type(), dy.scalar_type()),
             threads_for(x));
    return rows;
}

}  // namespace

TORCH_LIBRARY(rightbatch_cpu, m) {
    m.def("norm(Tensor x, Tensor weight, Tensor? bias, Tensor? probe, Tensor? metric, float eps, bool rms) -> Tensor");
    m.def("add_norm(Tensor x, Tensor branch, Tensor weight, Tensor? bias, Tensor? probe, Tensor? metric, float eps, "
          "bool rms) -> (Tensor, Tensor)");
    m.def("forward(Tensor x, Tensor weight, Tensor? bias, float eps, bool rms, ScalarType dtype) -> (Tensor, Tensor)");
    m.def("backward(Tensor dy, Tensor x, Tensor weight, Tensor stats, Tensor? metric, bool rms, bool has_bias, "
          "bool tracked) -> (Tensor, Tensor, Tensor, Tensor)");
    m.def("tap(Tensor dy, Tensor x, float eps, bool rms, bool bias) -> Tensor");
}

TORCH_LIBRARY_IMPL(rightbatch_cpu, CPU, m) {   // where autograd is out of the way, in inference mode, it adds nothing
    m.impl("norm", norm);
    m.impl("add_norm", add_norm);
    m.impl("forward", forward);
    m.impl("backward", backward);
    m.impl("tap", tap);
}

TORCH_LIBRARY_IMPL(rightbatch_cpu, AutogradCPU, m) {
    m.impl("norm", norm);
    m.impl("add_norm", add_norm);
}

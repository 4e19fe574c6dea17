// ln_kernel.cpp as torch operators, with their autograd in C++: through Python a norm layer spends as long on the way into
// the kernel as in it. ln_kernel.py compiles both files into one library and says what the arguments mean.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

extern "C" void norm_forward(const void* x, const void* branch, void* sum, const float* w, const float* b, void* y,
                             float* stats, int64_t rows, int64_t C, float eps, int rms, int dtypes, int threads);
extern "C" void norm_backward(const void* dy, const void* ds, const void* x, const float* w, const float* stats,
                              const float* metric, void* dx, float* dw, float* db, float* sq, int64_t B, int64_t T, int64_t C,
                              int rms, int dtypes, int threads);

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The usual case first: calls are short, and each operation on the way counts.
Tensor as_float(const Maybe& t) {
    if (!t) return Tensor();
    return t->scalar_type() == at::kFloat && t->is_contiguous() ? *t : t->to(at::kFloat).contiguous();
}

Tensor as_dtype(const Tensor& t, at::ScalarType dtype) { return !t.defined() || t.scalar_type() == dtype ? t : t.to(dtype); }

template <class T = void> T* data(const Tensor& t) { return t.defined() ? static_cast<T*>(t.data_ptr()) : nullptr; }

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
    Tensor y = at::empty_like(x, x.options().dtype(dtype)), stats = at::empty({rms ? 1 : 2, rows}, w.options()), sum;
    if (branch) sum = at::empty_like(x);
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
    Tensor dx = at::empty_like(x), dw = at::empty_like(w), db, sq;
    if (has_bias) db = at::empty_like(w);
    if (tracked) sq = at::empty({(rms ? 1 : 2) * (p.defined() ? 2 : 1), B}, w.options());
    norm_backward(data(dy), data(ds), data(x), data<float>(w), data<float>(stats), data<float>(p), data(dx), data<float>(dw),
                  data<float>(db), data<float>(sq), B, T, C, rms, dtypes_of(x.scalar_type(), dy.scalar_type()),
                  threads_for(x));
    return {dx, as_dtype(dw, weight.scalar_type()), as_dtype(db, weight.scalar_type()), sq};
}

enum Flags : int64_t { kRms = 1, kBias = 2, kTracked = 4 };

struct Norm : torch::autograd::Function<Norm> {
    // {y}, or {y, x + branch}
    static variable_list forward(AutogradContext* ctx, const Tensor& x, const Maybe& branch, const Tensor& weight,
                                 const Maybe& bias, const Maybe& probe, const Maybe& metric, double eps, bool rms,
                                 at::ScalarType dtype) {
        at::AutoDispatchBelowADInplaceOrView below;
        auto [sum, y, stats] = run_forward(x, branch, weight, bias, eps, rms, dtype);
        ctx->set_materialize_grads(false);
        ctx->save_for_backward({branch ? sum : x, weight, stats, metric.value_or(Tensor())});
        ctx->saved_data["flags"] = (rms ? kRms : 0) | (bias ? kBias : 0) | (probe ? kTracked : 0);
        return branch ? variable_list{y, sum} : variable_list{y};
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
        TORCH_CHECK(!at::GradMode::is_enabled(), "the norm layers' backward pass cannot be differentiated again: "
                    "create_graph=True needs norm_impl='torch'");
        const variable_list saved = ctx->get_saved_variables();   // under activation checkpointing this runs the forward again
        at::AutoDispatchBelowADInplaceOrView below;
        const int64_t flags = ctx->saved_data["flags"].toInt();
        const Maybe metric = saved[3].defined() ? Maybe(saved[3]) : std::nullopt;
        Tensor ds = grads.size() > 1 ? grads[1] : Tensor(), dx = ds, dw, db, sq;
        if (grads[0].defined())   // else y was not used
            std::tie(dx, dw, db, sq) = run_backward(grads[0], ds, saved[0], saved[1], saved[2], metric, flags & kRms,
                                                    flags & kBias, flags & kTracked);
        const Tensor dbranch = grads.size() < 2 ? Tensor() : dx;   // autograd casts it to the branch's dtype
        return {dx, dbranch, dw, db, sq, Tensor(), Tensor(), Tensor(), Tensor()};
    }
};

Tensor norm(const Tensor& x, const Tensor& weight, const Maybe& bias, const Maybe& probe, const Maybe& metric, double eps,
            bool rms, at::ScalarType dtype) {
    return Norm::apply(x, Maybe(), weight, bias, probe, metric, eps, rms, dtype)[0];
}

std::tuple<Tensor, Tensor> add_norm(const Tensor& x, const Tensor& branch, const Tensor& weight, const Maybe& bias,
                                    const Maybe& probe, const Maybe& metric, double eps, bool rms, at::ScalarType dtype) {
    const variable_list y_and_sum = Norm::apply(x, Maybe(branch), weight, bias, probe, metric, eps, rms, dtype);
    return {y_and_sum[1], y_and_sum[0]};
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

}  // namespace

TORCH_LIBRARY(rightbatch_cpu, m) {
    m.def("norm(Tensor x, Tensor weight, Tensor? bias, Tensor? probe, Tensor? metric, float eps, bool rms, "
          "ScalarType dtype) -> Tensor");
    m.def("add_norm(Tensor x, Tensor branch, Tensor weight, Tensor? bias, Tensor? probe, Tensor? metric, float eps, bool rms, "
          "ScalarType dtype) -> (Tensor, Tensor)");
    m.def("forward(Tensor x, Tensor weight, Tensor? bias, float eps, bool rms, ScalarType dtype) -> (Tensor, Tensor)");
    m.def("backward(Tensor dy, Tensor x, Tensor weight, Tensor stats, Tensor? metric, bool rms, bool has_bias, "
          "bool tracked) -> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(rightbatch_cpu, CPU, m) {   // where autograd is out of the way, in inference mode, it adds nothing
    m.impl("norm", norm);
    m.impl("add_norm", add_norm);
    m.impl("forward", forward);
    m.impl("backward", backward);
}

TORCH_LIBRARY_IMPL(rightbatch_cpu, AutogradCPU, m) {
    m.impl("norm", norm);
    m.impl("add_norm", add_norm);
}

// oneDNN's primitives behind one small class: made once for a shape, run on NumPy arrays.
//
// Images are NHWC, filters HWIO and matrices C-contiguous, as everywhere here. What else a
// primitive wants, mostly the filter, is reordered on the way in or out, in memory that each thread
// has once: [reordered arrays | scratchpad], as long as its longest primitive needs. A Primitive
// holds no data, so all threads share it.
//
// The library is linked by its name alone: who imports this module has loaded it before.

#include <omp.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/mman.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "dnnl.hpp"
#include "gil.h"

namespace py = pybind11;
using dnnl::memory;
using Tag = memory::format_tag;
using Type = memory::data_type;

namespace {

constexpr size_t LINE = 64, HUGE_PAGE = 2 << 20;

size_t padded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Never destroyed: at exit threads may still be at work.
const dnnl::engine &engine() {
    static const auto *cpu = new dnnl::engine(dnnl::engine::kind::cpu, 0);
    return *cpu;
}

// What a thread runs primitives with.
struct Workspace {
    dnnl::stream stream{engine()};
    char *memory = nullptr;
    size_t size = 0;

    ~Workspace() { std::free(memory); }

    char *room(size_t bytes) {
        if (bytes <= size) return memory;
        std::free(memory);
        size = padded(bytes, bytes < HUGE_PAGE ? LINE : HUGE_PAGE);
        memory = static_cast<char *>(std::aligned_alloc(bytes < HUGE_PAGE ? LINE : HUGE_PAGE, size));
        if (memory == nullptr) {
            size = 0;
            throw std::bad_alloc();
        }
#ifdef MADV_HUGEPAGE
        if (bytes >= HUGE_PAGE) madvise(memory, size, MADV_HUGEPAGE);
#endif
        return memory;
    }
};

Workspace &workspace() {
    thread_local Workspace mine;
    return mine;
}

// Lets go of the GIL for its lifetime.
struct LetGo {
    PyThreadState *const state = md_let_go();
    ~LetGo() { md_take_back(state); }
};

// Whether an array's elements are of a type; of bfloat16 NumPy knows only what ml_dtypes calls it.
bool is_of(const py::handle &array, Type type) {
    if (type == Type::f32) return py::isinstance<py::array_t<float>>(array);
    return py::isinstance<py::array>(array) &&
           py::cast<std::string>(array.attr("dtype").attr("name")) == "bfloat16";
}

// Where the data of an array is, which must be of a type, of one piece, and so many bytes.
void *checked(const char *name, const py::handle &given, bool written, size_t bytes,
              Type type = Type::f32) {
    if (!is_of(given, type))
        throw py::type_error(std::string(name) + " must be a " +
                             (type == Type::f32 ? "float32" : "bfloat16") + " array");
    const auto array = py::reinterpret_borrow<py::array>(given);
    if (!(array.flags() & py::array::c_style) || (written && !array.writeable()))
        throw py::value_error(std::string(name) + " must be C-contiguous" +
                              (written ? " and writeable" : ""));
    if (size_t(array.nbytes()) != bytes)
        throw py::value_error(std::string(name) + " must have " + std::to_string(bytes) +
                              " bytes, got " + std::to_string(array.nbytes()));
    return const_cast<void *>(array.data());
}

// An array that a primitive reads or writes: as the caller has it, and as the primitive wants it.
struct Operand {
    const char *name;
    int role;
    bool written;
    memory::desc given, wanted;
    dnnl::reorder reorder = {};  // empty where both are the same
    size_t place = 0;            // of the reordered array in the thread's memory
};

using Operands = std::vector<Operand>;

class Primitive {
  public:
    std::string implementation;

    Primitive(const dnnl::primitive_desc_base &description, const dnnl::primitive &primitive,
              const Operands &given, int threads)
        : implementation(description.impl_info_str()),
          primitive(primitive),
          operands(given),
          scratchpad(description.scratchpad_desc()),
          threads(threads) {
        for (Operand &operand : operands) {
            if (operand.given == operand.wanted) continue;
            const auto &from = operand.written ? operand.wanted : operand.given;
            const auto &to = operand.written ? operand.given : operand.wanted;
            operand.reorder = dnnl::reorder({engine(), from, engine(), to});
            operand.place = room;
            room += padded(operand.wanted.get_size(), LINE);
            implementation += std::string(", reordered ") + operand.name;
        }
        scratch = room;
        room += scratchpad.get_size();
    }

    void run(const py::args &arrays) const {
        if (arrays.size() != operands.size())
            throw py::type_error("run needs " + std::to_string(operands.size()) +
                                 " arrays, got " + std::to_string(arrays.size()));
        std::vector<void *> data;
        for (size_t i = 0; i < operands.size(); ++i) {
            const Operand &operand = operands[i];
            data.push_back(checked(operand.name, arrays[i], operand.written,
                                   operand.given.get_size(), operand.given.get_data_type()));
        }
        const LetGo without_gil;
        execute(data);
    }

  private:
    dnnl::primitive primitive;
    Operands operands;
    memory::desc scratchpad;
    size_t room = 0, scratch = 0;
    int threads;

    void execute(const std::vector<void *> &data) const {
        omp_set_num_threads(threads);
        Workspace &here = workspace();
        char *own = here.room(room);
        std::vector<memory> used(operands.size());
        std::vector<dnnl_exec_arg_t> arguments;
        for (size_t i = 0; i < operands.size(); ++i) {
            const Operand &operand = operands[i];
            used[i] = memory(operand.wanted, engine(),
                             operand.reorder ? own + operand.place : data[i]);
            if (operand.reorder && !operand.written) {
                memory from(operand.given, engine(), data[i]);
                operand.reorder.execute(here.stream, from, used[i]);
            }
            arguments.push_back({operand.role, used[i].get()});
        }
        memory last(scratchpad, engine(), own + scratch);
        arguments.push_back({DNNL_ARG_SCRATCHPAD, last.get()});
        dnnl::error::wrap_c_api(
            dnnl_primitive_execute(primitive.get(), here.stream.get(), int(arguments.size()),
                                   arguments.data()),
            "oneDNN could not run a primitive");
        for (size_t i = 0; i < operands.size(); ++i) {
            const Operand &operand = operands[i];
            if (!operand.reorder || !operand.written) continue;
            memory to(operand.given, engine(), data[i]);
            operand.reorder.execute(here.stream, used[i], to);
        }
        here.stream.wait();
    }
};

using Made = std::unique_ptr<Primitive>;

dnnl::primitive_attr attributes() {
    dnnl::primitive_attr attr;
    attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    return attr;
}

// Whether there is an implementation, and not only the library's reference: that one is there for
// comparison, and takes seconds where others take milliseconds.
bool is_fast(const dnnl::primitive_desc &description) {
    return description && std::string(description.impl_info_str()).rfind("ref", 0) != 0;
}

// A convolution's shapes: x [n, h, w, c], w [kh, kw, c, k], y [n, oh, ow, k], perhaps a bias [k].
struct Convolution {
    using Pair = std::array<memory::dim, 2>;
    using Four = std::array<memory::dim, 4>;

    memory::desc x, w, bias, y;            // as the caller has them
    memory::desc any_x, any_w, any_y, any_dw;  // as a primitive may have them
    memory::dims strides, before, after;
    int threads;

    // own_layout: whether images too may be reordered to what the library likes best.
    // narrow: bfloat16. Sums are float32 all the same, and rounded once.
    // has_bias: whether `forward` adds one.
    Convolution(Four xs, Four ws, Four ys, Pair strides, Pair before, Pair after, bool own_layout,
                bool narrow, bool has_bias, int threads)
        : strides(strides.begin(), strides.end()),
          before(before.begin(), before.end()),
          after(after.begin(), after.end()),
          threads(threads) {
        const memory::dims x_dims{xs[0], xs[3], xs[1], xs[2]}, w_dims{ws[3], ws[2], ws[0], ws[1]},
            y_dims{ys[0], ys[3], ys[1], ys[2]};
        const Tag images = own_layout ? Tag::any : Tag::nhwc;
        const Type type = narrow ? Type::bf16 : Type::f32;
        x = {x_dims, type, Tag::nhwc}, any_x = {x_dims, type, images};
        w = {w_dims, type, Tag::hwio}, any_w = {w_dims, type, Tag::any};
        y = {y_dims, type, Tag::nhwc}, any_y = {y_dims, type, images};
        if (has_bias) bias = {{ws[3]}, type, Tag::x};
        any_dw = {w_dims, Type::f32, Tag::any};
    }

    dnnl::convolution_forward::primitive_desc description() const {
        omp_set_num_threads(threads);
        return {engine(), dnnl::prop_kind::forward_training, dnnl::algorithm::convolution_direct,
                any_x, any_w, bias, any_y, strides, before, after, attributes(), true};
    }

    Made forward() const {
        const auto pd = description();
        if (!is_fast(pd)) return nullptr;
        Operands operands{{"x", DNNL_ARG_SRC, false, x, pd.src_desc()},
                          {"w", DNNL_ARG_WEIGHTS, false, w, pd.weights_desc()}};
        if (!bias.is_zero()) operands.push_back({"bias", DNNL_ARG_BIAS, false, bias, bias});
        operands.push_back({"y", DNNL_ARG_DST, true, y, pd.dst_desc()});
        return std::make_unique<Primitive>(pd, dnnl::convolution_forward(pd), operands, threads);
    }

    Made backward_input() const {
        const auto hint = description();
        if (!hint) return nullptr;
        const dnnl::convolution_backward_data::primitive_desc pd(
            engine(), dnnl::algorithm::convolution_direct, any_x, any_w, any_y, strides, before,
            after, hint, attributes(), true);
        if (!is_fast(pd)) return nullptr;
        const Operands operands{
            {"dy", DNNL_ARG_DIFF_DST, false, y, pd.diff_dst_desc()},
            {"w", DNNL_ARG_WEIGHTS, false, w, pd.weights_desc()},
            {"dx", DNNL_ARG_DIFF_SRC, true, x, pd.diff_src_desc()}};
        return std::make_unique<Primitive>(pd, dnnl::convolution_backward_data(pd), operands,
                                           threads);
    }

    Made backward_filter() const {
        const auto hint = description();
        if (!hint) return nullptr;
        const dnnl::convolution_backward_weights::primitive_desc pd(
            engine(), dnnl::algorithm::convolution_direct, any_x, any_dw, any_y, strides, before,
            after, hint, attributes(), true);
        if (!is_fast(pd)) return nullptr;
        const Operands operands{
            {"x", DNNL_ARG_SRC, false, x, pd.src_desc()},
            {"dy", DNNL_ARG_DIFF_DST, false, y, pd.diff_dst_desc()},
            {"dw", DNNL_ARG_DIFF_WEIGHTS, true, w, pd.diff_weights_desc()}};
        return std::make_unique<Primitive>(pd, dnnl::convolution_backward_weights(pd), operands,
                                           threads);
    }
};

// c [n, m] = a [n, k] @ b [k, m], where a or b may be given transposed.
Made matmul(memory::dim n, memory::dim k, memory::dim m, bool transpose_a, bool transpose_b,
            int threads) {
    omp_set_num_threads(threads);
    const memory::desc a({n, k}, Type::f32, transpose_a ? Tag::ba : Tag::ab),
        b({k, m}, Type::f32, transpose_b ? Tag::ba : Tag::ab), c({n, m}, Type::f32, Tag::ab);
    const dnnl::matmul::primitive_desc pd(engine(), a, b, c, attributes(), true);
    if (!is_fast(pd)) return nullptr;
    const Operands operands{{"a", DNNL_ARG_SRC, false, a, a},
                            {"b", DNNL_ARG_WEIGHTS, false, b, b},
                            {"c", DNNL_ARG_DST, true, c, c}};
    return std::make_unique<Primitive>(pd, dnnl::matmul(pd), operands, threads);
}

// The same by the library's other matrix product, which is not a primitive.
void sgemm(const py::handle &a, const py::handle &b, const py::handle &c, memory::dim n,
           memory::dim k, memory::dim m, bool transpose_a, bool transpose_b, int threads) {
    const auto *from_a = static_cast<const float *>(checked("a", a, false, n * k * sizeof(float)));
    const auto *from_b = static_cast<const float *>(checked("b", b, false, k * m * sizeof(float)));
    auto *into = static_cast<float *>(checked("c", c, true, n * m * sizeof(float)));
    const LetGo without_gil;
    omp_set_num_threads(threads);
    dnnl::error::wrap_c_api(
        dnnl_sgemm(transpose_a ? 'T' : 'N', transpose_b ? 'T' : 'N', n, m, k, 1, from_a,
                   transpose_a ? n : k, from_b, transpose_b ? k : m, 0, into, m),
        "oneDNN could not multiply two matrices");
}

std::string version() {
    const auto *v = dnnl::version();
    return std::to_string(v->major) + "." + std::to_string(v->minor) + "." +
           std::to_string(v->patch);
}

bool has_avx2() { return int(dnnl::get_effective_cpu_isa()) >= int(dnnl::cpu_isa::avx2); }

}  // namespace

PYBIND11_MODULE(onednn, module) {
    using py::arg;
    py::class_<Primitive>(module, "Primitive")
        .def_readonly("implementation", &Primitive::implementation)
        .def("run", &Primitive::run);
    py::class_<Convolution>(module, "Convolution")
        .def(py::init<Convolution::Four, Convolution::Four, Convolution::Four, Convolution::Pair,
                      Convolution::Pair, Convolution::Pair, bool, bool, bool, int>(),
             arg("x"), arg("w"), arg("y"), arg("strides"), arg("before"), arg("after"),
             arg("own_layout"), arg("narrow"), arg("has_bias"), arg("threads"))
        .def("forward", &Convolution::forward)
        .def("backward_input", &Convolution::backward_input)
        .def("backward_filter", &Convolution::backward_filter);
    module.def("matmul", &matmul, arg("n"), arg("k"), arg("m"), arg("transpose_a"),
               arg("transpose_b"), arg("threads"));
    module.def("sgemm", &sgemm, arg("a"), arg("b"), arg("c"), arg("n"), arg("k"), arg("m"),
               arg("transpose_a"), arg("transpose_b"), arg("threads"));
    module.def("version", &version);
    module.def("has_avx2", &has_avx2);
}

// Optimizer rules on a GPU: all tensors of a model in one launch.
//
// update.h has the formulas; its md_update on the host and this one differ in who walks.

#include "grid.cuh"
#include "update.h"

// One step of a rule on all tensors. Columns of the table: weights, the slots, gradients.
template <class Rule>
MD_GPU void md_update(const md_grid_table &table, Rule rule, T scale, T clip, const T *decay) {
    md_walk(table, [&](int row, ptrdiff_t first, int count) {
        const md_preparation<T> before{scale, clip, decay[row]};
        T *w = table.get<T>(row, 0, first);
        const T *g = table.get<const T>(row, Rule::slots + 1, first);
        T *a = table.get<T>(row, Rule::slots > 0 ? 1 : 0, first);
        T *b = table.get<T>(row, Rule::slots > 1 ? 2 : 0, first);
        md_each<MD_WIDTH>(table.aligned(row), count, [&](auto width, int i) {
            constexpr int n = decltype(width)::value;
            auto weights = md_load<n>(w + i);
            auto gradients = md_load<n>(g + i);
            for (int k = 0; k < n; ++k)
                gradients.at[k] = md_gradient(before, gradients.at[k], weights.at[k]);
            if constexpr (Rule::slots == 0) {
                for (int k = 0; k < n; ++k) md_step(rule, gradients.at[k], weights.at[k]);
            } else if constexpr (Rule::slots == 1) {
                auto as = md_load<n>(a + i);
                for (int k = 0; k < n; ++k) md_step(rule, gradients.at[k], weights.at[k], as.at[k]);
                md_store<n>(a + i, as);
            } else {
                auto as = md_load<n>(a + i), bs = md_load<n>(b + i);
                for (int k = 0; k < n; ++k)
                    md_step(rule, gradients.at[k], weights.at[k], as.at[k], bs.at[k]);
                md_store<n>(a + i, as);
                md_store<n>(b + i, bs);
            }
            md_store<n>(w + i, weights);
        });
    });
}

// The constants of a rule are rounded to T by who launches; `decay` has one for each tensor.
MD_KERNEL sgd(md_grid_table table, md_sgd<T> rule, T scale, T clip, const T *decay) {
    md_update(table, rule, scale, clip, decay);
}
MD_KERNEL momentum(md_grid_table table, md_momentum<T> rule, T scale, T clip, const T *decay) {
    md_update(table, rule, scale, clip, decay);
}
MD_KERNEL rmsprop(md_grid_table table, md_rmsprop<T> rule, T scale, T clip, const T *decay) {
    md_update(table, rule, scale, clip, decay);
}
MD_KERNEL adam(md_grid_table table, md_adam<T> rule, T scale, T clip, const T *decay) {
    md_update(table, rule, scale, clip, decay);
}

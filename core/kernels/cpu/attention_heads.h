#pragma once

// A head of attention: its sizes, its rows in memory and packed, and the
// threads that share the heads. Read by core/kernels/cpu/attention*.cpp only.

#include <algorithm>
#include <cstdint>

#include "core/kernels/attention.h"
#include "core/kernels/cpu/gemm.h"

namespace shardbook::kernels::cpu {

// The sizes of one head.
template <typename S>
struct Sizes {
  explicit Sizes(const AttentionArgs& args)
      : dim(args.head_dim),
        padded_dim(round_up(args.head_dim, kTileCols<S>)),
        values(args.value_width()),
        padded_values(round_up(values, kTileCols<S>)),
        keys(args.k_rows),
        padded_keys(round_up(args.k_rows, kTileCols<S>)) {}
  // Columns of queries and keys, and of values
  std::int64_t dim, padded_dim, values, padded_values;
  std::int64_t keys, padded_keys;
};

// A head's rows as they lie in memory.
template <typename T>
struct HeadRows {
  T* data;
  std::int64_t row;
  T* operator[](std::int64_t i) const { return data + i * row; }
};
template <typename T>
HeadRows<T> head_rows(T* data, const HeadStrides& strides, std::int64_t b,
                      std::int64_t h) {
  return {data + b * strides.batch + h * strides.head, strides.row};
}

// Columns are rows of x: out has panels [rows / kTileCols][dim][kTileCols].
template <typename T>
void pack_across(const HeadRows<const T>& x, std::int64_t rows,
                 std::int64_t dim, Compute<T>* out) {
  pack_panels<kTileCols<Compute<T>>>(x.data, x.row, 1, rows, dim, out);
}

// Columns are dims of x: out has panels [dim / kTileCols][rows][kTileCols].
template <typename T>
void pack_along(const HeadRows<const T>& x, std::int64_t rows, std::int64_t dim,
                Compute<T>* out) {
  pack_panels<kTileCols<Compute<T>>>(x.data, 1, x.row, dim, rows, out);
}

// Rows of x times `scale`, `ld` apart, with zeros past their dims.
template <typename T>
void copy_rows(const HeadRows<const T>& x, std::int64_t rows, std::int64_t dim,
               Compute<T> scale, Compute<T>* out, std::int64_t ld) {
  using S = Compute<T>;
  const Vec<S> by(scale);
  for (std::int64_t r = 0; r < rows; ++r) {
    const T* const from = x[r];
    S* const to = out + r * ld;
    std::int64_t c = 0;
    for (; c + kLanes<S> <= dim; c += kLanes<S>) {
      store(to + c, load(from + c) * by);
    }
    if (c < dim) store(to + c, load_part(from + c, dim - c) * by);
    for (c = round_up(dim, kLanes<S>); c < ld; c += kLanes<S>) {
      store(to + c, Vec<S>(S(0)));
    }
  }
}

// Smallest number of key heads per thread.
inline std::int64_t head_grain(const AttentionArgs& args) {
  const std::int64_t work =
      args.q_rows * args.k_rows * (args.heads / args.kv_heads) * args.head_dim;
  return std::max<std::int64_t>(1, 500000 / std::max<std::int64_t>(work, 1));
}

// Calls work(head, b, kv) for all heads of keys, over the cores of this rank.
// Each thread has a Head, with scratch of its own.
template <typename Head, typename Dropout, typename Work>
void for_key_heads(KernelContext& context, const AttentionArgs& args,
                   const Dropout& dropout, const Work& work) {
  using S = typename Head::S;
  const std::int64_t each = round_up(Head::scratch_size(args), 16);
  const Scratch scratch(context, each * sizeof(S) * max_threads());
  parallel_pieces(0, args.batch * args.kv_heads, head_grain(args),
                  [&](int piece, std::int64_t from, std::int64_t to) {
                    Head head(args, dropout, scratch.as<S>() + piece * each);
                    for (std::int64_t i = from; i < to; ++i) {
                      work(head, i / args.kv_heads, i % args.kv_heads);
                    }
                  });
}

}  // namespace shardbook::kernels::cpu

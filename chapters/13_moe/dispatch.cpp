#include "chapters/13_moe/dispatch.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "core/autograd.h"
#include "core/check.h"

namespace shardbook::moe {
namespace {

using Indices = std::vector<std::int64_t>;

std::int64_t sum_of(const Indices& values) {
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}

/// Which token sits in each slot [E C]; S: none.
Indices token_of_slot(const Routing& routing) {
  Indices tokens(at(routing.experts * routing.capacity), routing.tokens);
  for (std::size_t i = 0; i < routing.slot.size(); ++i) {
    if (routing.slot[i] < 0) continue;
    const std::int64_t place =
        routing.expert[i] * routing.capacity + routing.slot[i];
    tokens[at(place)] = static_cast<std::int64_t>(i) / routing.k;
  }
  return tokens;
}

/// The slot of each choice [S k], as a number in [E C]; E C: dropped.
Indices slot_of_choice(const Routing& routing) {
  Indices slots = routing.slot;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    slots[i] = slots[i] < 0 ? routing.experts * routing.capacity
                            : routing.expert[i] * routing.capacity + slots[i];
  }
  return slots;
}

bool is_alone(const ProcessGroup* ep) {
  return ep == nullptr || ep->size() == 1;
}

Tensor all_to_all(const Tensor& rows, ProcessGroup& ep, const char* label) {
  Tensor arrived = rows.empty_like();
  ep.all_to_all(arrived, rows, label).wait();
  return arrived;
}

// [E, C, M] -> [El, ep C, M]. Rows arrive by source in a buffer of their own,
// and are then sorted by expert.
Tensor scatter(const Tensor& rows, ProcessGroup& ep, const char* label) {
  const std::int64_t p = ep.size(), local = rows.size(0) / p;
  const std::int64_t c = rows.size(1), m = rows.size(2);
  Tensor arrived;
  {
    const MemoryScope kind(MemoryKind::kCommunication);
    arrived = all_to_all(rows, ep, label);
  }
  return reshape(permute(reshape(arrived, {p, local, c, m}), {1, 0, 2, 3}),
                 {local, p * c, m});
}

Tensor gather(const Tensor& rows, ProcessGroup& ep, const char* label) {
  const std::int64_t p = ep.size(), local = rows.size(0);
  const std::int64_t c = rows.size(1) / p, m = rows.size(2);
  Tensor leaving;
  {
    const MemoryScope kind(MemoryKind::kCommunication);
    leaving = permute(reshape(rows, {local, p, c, m}), {1, 0, 2, 3});
  }
  return reshape(all_to_all(leaving, ep, label), {p * local, c, m});
}

using Exchange = Tensor (*)(const Tensor& rows, ProcessGroup& ep,
                            const char* label);

/// An exchange whose backward is the other one.
Tensor exchanged(const Tensor& rows, ProcessGroup& ep, Exchange forward,
                 const char* label, Exchange backward, const char* back_label) {
  return autograd::custom_function(
      label, {rows},
      [&](const Tensors& in) { return Tensors{forward(in[0], ep, label)}; },
      [&ep, backward, back_label](const Tensors& grads) {
        return Tensors{backward(grads[0], ep, back_label)};
      })[0];
}

Tensor move_rows(const Tensor& rows, ProcessGroup& ep, const Indices& send_rows,
                 const Indices& recv_rows, const std::string& label) {
  const std::int64_t m = rows.size(1);
  Indices send = send_rows, recv = recv_rows;
  for (std::int64_t& each : send) each *= m;
  for (std::int64_t& each : recv) each *= m;
  Tensor arrived = Tensor::empty({sum_of(recv_rows), m}, rows.options());
  ep.all_to_all_v(arrived, rows, send, recv, label).wait();
  return arrived;
}

/// n indices. On shapes nobody reads them, so they are not made.
Tensor indices(std::int64_t n, const Tensor& like,
               const std::function<Indices()>& values) {
  return index_tensor(like.is_meta() ? Indices() : values(), {n}, like);
}

/// The rows of these indices; an index past the last row reads zeros.
Tensor rows_at(const Tensor& rows, const Tensor& index) {
  return embedding_part(rows, index, 0);
}

}  // namespace

// --- One rank ------------------------------------------------------------------

Tensor naive_dispatch(const Tensor& x, const Routing& routing) {
  const Tensor mask = dispatch_mask(routing, x.options());
  const std::int64_t slots = routing.experts * routing.capacity;
  const Tensor rows =
      matmul(reshape(mask, {routing.tokens, slots}), x, /*trans_a=*/true);
  return reshape(rows, {routing.experts, routing.capacity, x.size(1)});
}

Tensor naive_combine(const Tensor& outputs, const Routing& routing,
                     const Tensor& weights) {
  const Tensor mask = to_dtype(combine_mask(routing, weights), outputs.dtype());
  const std::int64_t slots = routing.experts * routing.capacity;
  return matmul(reshape(mask, {routing.tokens, slots}),
                reshape(outputs, {slots, outputs.size(2)}));
}

Tensor dispatch(const Tensor& x, const Routing& routing) {
  const std::int64_t slots = routing.experts * routing.capacity;
  const Tensor from = indices(slots, x, [&] { return token_of_slot(routing); });
  return reshape(rows_at(x, from),
                 {routing.experts, routing.capacity, x.size(1)});
}

Tensor combine(const Tensor& outputs, const Routing& routing,
               const Tensor& weights) {
  const std::int64_t slots = routing.experts * routing.capacity;
  const Tensor from = indices(routing.tokens * routing.k, outputs,
                              [&] { return slot_of_choice(routing); });
  return weigh_rows(reshape(outputs, {slots, outputs.size(2)}), from, weights);
}

Tensor weigh_rows(const Tensor& rows, const Tensor& index,
                  const Tensor& weights) {
  const std::int64_t s = weights.size(0), k = weights.size(1), m = rows.size(1);
  const Tensor factors = reshape(to_dtype(weights, rows.dtype()), {s, k, 1});
  const Tensor chosen = reshape(rows_at(rows, index), {s, k, m});
  const Tensor weighed = mul(chosen, factors);
  return k == 1 ? reshape(weighed, {s, m}) : sum(weighed, 1);
}

// --- Over the ranks of an EP group ---------------------------------------------

Tensor to_experts(const Tensor& rows, ProcessGroup* ep) {
  if (is_alone(ep)) return rows;
  SB_CHECK(rows.size(0) % ep->size() == 0, "moe: ", rows.size(0),
           " experts do not divide over the ", ep->size(),
           " ranks of an expert-parallel group");
  return exchanged(rows, *ep, scatter, "dispatch", gather, "d_dispatch");
}

Tensor from_experts(const Tensor& rows, ProcessGroup* ep,
                    std::int64_t experts) {
  if (is_alone(ep)) return rows;
  SB_CHECK(rows.size(0) * ep->size() == experts, "moe: ", rows.size(0),
           " local experts on ", ep->size(), " ranks are not ", experts);
  return exchanged(rows, *ep, gather, "combine", scatter, "d_combine");
}

Tensor exchange_rows(const Tensor& rows, ProcessGroup* ep,
                     const Indices& send_rows, const Indices& recv_rows,
                     const char* label) {
  if (is_alone(ep)) return rows;
  return autograd::custom_function(
      "exchange_rows", {rows},
      [&](const Tensors& in) {
        return Tensors{move_rows(in[0], *ep, send_rows, recv_rows, label)};
      },
      [ep, send_rows, recv_rows, label](const Tensors& grads) {
        return Tensors{move_rows(grads[0], *ep, recv_rows, send_rows,
                                 std::string("d_") + label)};
      })[0];
}

Indices exchange_counts(const Indices& counts, ProcessGroup* ep,
                        const Tensor& like,
                        const std::function<Indices(int source)>& drawn) {
  if (is_alone(ep)) return counts;
  const auto n = static_cast<std::int64_t>(counts.size());
  const MemoryScope kind(MemoryKind::kCommunication);
  const Tensor leaving = index_tensor(counts, {n}, like);
  const Tensor arrived = leaving.empty_like();
  ep->all_to_all(arrived, leaving, "counts").wait();
  if (!like.is_meta()) return arrived.to_vector<std::int64_t>();
  Indices received;
  const std::int64_t local = n / ep->size(), first = ep->rank() * local;
  for (int source = 0; source < ep->size(); ++source) {
    const Indices all = drawn(source);
    received.insert(received.end(), all.begin() + first,
                    all.begin() + first + local);
  }
  return received;
}

// --- Without capacity: rows sorted by expert ---------------------------------------

Tensor dropless(const Tensor& rows, const DroplessCall& call,
                std::int64_t& sent_rows) {
  const Routing& routing = call.routing;
  const std::int64_t k = routing.k,
                     ep = call.ep == nullptr ? 1 : call.ep->size();
  const std::int64_t local = routing.experts / ep, m = rows.size(1);

  // Sort the choices by expert, which keeps each rank's together
  SortedChoices sorted;
  if (rows.is_meta()) {
    sorted.counts = routing.expert.empty()
                        ? call.drawn(call.ep == nullptr ? 0 : call.ep->rank())
                        : routing.exp_counts();
  } else {
    sorted = sort_by_expert(routing);
  }
  const std::int64_t n = sum_of(sorted.counts);
  const Tensor leaving =
      rows_at(rows, indices(n, rows, [&] {
                Indices token;
                for (const std::int64_t choice : sorted.choice)
                  token.push_back(choice / k);
                return token;
              }));

  // Exchange the counts and the rows, which arrive by source, then by expert
  const Indices counts =
      exchange_counts(sorted.counts, call.ep, rows, call.drawn);
  Indices send(at(ep), 0), recv(at(ep), 0), of_expert(at(local), 0);
  for (std::int64_t e = 0; e < routing.experts; ++e) {
    send[at(e / local)] += sorted.counts[at(e)];
    recv[at(e / local)] += counts[at(e)];
    of_expert[at(e % local)] += counts[at(e)];
  }
  const Tensor arrived =
      exchange_rows(leaving, call.ep, send, recv, "dispatch");
  const std::int64_t total = arrived.size(0);

  // A table with as many rows for each expert as the busiest one has: where each
  // row that arrived has its cell, and which row each cell has
  const std::int64_t longest = std::max<std::int64_t>(
      1, *std::max_element(of_expert.begin(), of_expert.end()));
  const auto cells = [&] {
    Indices from, next;
    for (std::int64_t e = 0; e < local; ++e) next.push_back(e * longest);
    for (std::int64_t e = 0; e < routing.experts; ++e) {
      for (std::int64_t j = 0; j < counts[at(e)]; ++j) {
        from.push_back(next[at(e % local)]++);
      }
    }
    return from;
  };
  const Tensor table = indices(local * longest, rows, [&] {
    Indices row(at(local * longest), total);
    std::int64_t i = 0;
    for (const std::int64_t cell : cells()) row[at(cell)] = i++;
    return row;
  });
  const Tensor grouped = reshape(rows_at(arrived, table), {local, longest, m});
  const Tensor outputs = reshape(call.experts(grouped), {local * longest, m});
  const Tensor back =
      exchange_rows(rows_at(outputs, indices(total, rows, cells)), call.ep,
                    recv, send, "combine");
  const std::size_t here = at(ep == 1 ? 0 : call.ep->rank());
  sent_rows += n - send[here] + total - recv[here];
  const Tensor place = indices(routing.tokens * k, rows, [&] {
    Indices of_choice(at(routing.tokens * k), n);
    for (std::int64_t i = 0; i < n; ++i)
      of_choice[at(sorted.choice[at(i)])] = i;
    return of_choice;
  });
  return weigh_rows(back, place, call.weights);
}

}  // namespace shardbook::moe

// Dispatch without capacity (dispatch.h): rows sorted by expert.

#include <algorithm>

#include "chapters/13_moe/dispatch.h"

namespace shardbook::moe {

namespace {

using Indices = std::vector<std::int64_t>;

/// The rows of these indices; an index past the last row reads zeros.
Tensor rows_at(const Tensor& rows, const Indices& index) {
  const auto n = static_cast<std::int64_t>(index.size());
  return embedding_part(rows, index_tensor(index, {n}, rows), 0);
}

}  // namespace

Tensor dropless(const Tensor& rows, const DroplessCall& call,
                std::int64_t& sent_rows) {
  const Routing& routing = call.routing;
  const std::int64_t k = routing.k,
                     ep = call.ep == nullptr ? 1 : call.ep->size();
  const std::int64_t local = routing.experts / ep, m = rows.size(1);

  // Sort the choices by expert, which keeps each rank's together
  const SortedChoices sorted = sort_by_expert(routing);
  const auto n = static_cast<std::int64_t>(sorted.choice.size());
  Indices token, place(at(routing.tokens * k), n);
  for (std::int64_t i = 0; i < n; ++i) {
    token.push_back(sorted.choice[at(i)] / k);
    place[at(sorted.choice[at(i)])] = i;
  }
  const Tensor leaving = rows_at(rows, token);

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

  // A table with as many rows for each expert as the busiest one has
  const std::int64_t longest = std::max<std::int64_t>(
      1, *std::max_element(of_expert.begin(), of_expert.end()));
  Indices table(at(local * longest), total), from, next;
  for (std::int64_t e = 0; e < local; ++e) next.push_back(e * longest);
  for (std::int64_t e = 0; e < routing.experts; ++e) {
    for (std::int64_t j = 0; j < counts[at(e)]; ++j) {
      const std::int64_t cell = next[at(e % local)]++;
      table[at(cell)] = static_cast<std::int64_t>(from.size());
      from.push_back(cell);
    }
  }
  const Tensor grouped = reshape(rows_at(arrived, table), {local, longest, m});
  const Tensor outputs = reshape(call.experts(grouped), {local * longest, m});
  const Tensor back =
      exchange_rows(rows_at(outputs, from), call.ep, recv, send, "combine");
  const std::size_t here = at(ep == 1 ? 0 : call.ep->rank());
  sent_rows += n - send[here] + total - recv[here];
  return weigh_rows(back, index_tensor(place, {routing.tokens * k}, rows),
                    call.weights);
}

}  // namespace shardbook::moe

// Dispatch without capacity (dispatch.h): rows sorted by expert.

#include <algorithm>
#include <functional>
#include <numeric>

#include "chapters/13_moe/dispatch.h"

namespace shardbook::moe {

namespace {

using Indices = std::vector<std::int64_t>;

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
  const std::int64_t n = std::accumulate(sorted.counts.begin(),
                                         sorted.counts.end(), std::int64_t{0});
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

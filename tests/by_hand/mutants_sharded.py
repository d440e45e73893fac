"""Mutants of tensor, sequence and expert parallelism: chapters 07 to 13."""

from mutants import chapter, folder

# --- Losses and gradients that all of them share -----------------------------

shared = chapter("common/sharded", "tensor_parallel_2d")
LOSSES = "*SummaLayers*:*SummaGpt*"
# The mean of the ranks' own means
shared("loss.cpp", "const Tensor total_count = sums.flat_view(1, {});",
       "const Tensor total_count = count_targets(targets, local.dtype());",
       LOSSES)
shared("loss.cpp", "return Tensors{div(grads[0], total_count)};", "return grads;",
       LOSSES)
# Counts targets of -100
shared("loss.cpp", "return sum(sub(relu(add_scalar(t, 1)), relu(t)));",
       "return sum(square(sub(add_scalar(t, 1), t)));", LOSSES)
norms = chapter("common/sharded", "tensor_parallel_3d")
norms("sharded_strategy.cpp",
      "if (is_first_holder(sharded_.layout, each.name, group_.rank())) {",
      "if (group_.rank() >= 0) {", "DimensionsTraining.*")

# --- 07 -----------------------------------------------------------------------

flat = chapter("07_tensor_parallel", "tensor_parallel")
flat("mappings.cpp", 'group.all_reduce(sum, ReduceOp::kSum, "f").wait();', "",
     "*Mappings*:TensorParallel*")
flat("mappings.cpp", "if (around.before > 1) parts = transpose(parts, 0, 1);",
     "", "*Mappings*")
# The bias counts t times
flat("megatron_layers.cpp", "reduce_from(linear(part, weight), *tp_);\n"
     "  return bias.defined() ? add(sum, bias) : sum;",
     "reduce_from(linear(part, weight, bias), *tp_);\n  return sum;",
     "*TensorParallel*")
flat("megatron_layers.cpp",
     "{cut_columns(is_bias ? 0 : 1, rank, t, part.columns)};",
     "{is_bias ? Shard{0, rank, t} : cut_columns(1, rank, t, part.columns)};",
     "*Training*:*Checkpoints*")
tables = chapter("common/models", "tensor_parallel")
tables("models.cpp", "first_head(layers.head_rank * heads),", "first_head(0),",
       "*Training*:TensorParallel*:*Rng*")
# A Llama: a contiguous half of [gate | up] is the gate
tables("block.cpp", "{{f, f}, {f, f}}", "{{2 * f, 2 * f}}", "*TensorParallelLlama*")
tables("models.cpp", "config.llama.kv_heads / layers.head_ranks, 1);",
       "config.llama.kv_heads, 1);", "*TensorParallelLlama*")
tables("block.cpp", "            std::min(static_cast<double>(each.parts), t);",
       "            t;", "*TensorParallelLlama*")
# Neighbours add the gradients of the keys that they share
flat("partial_gradients.cpp",
     'sharers_->all_reduce(sums, ReduceOp::kSum, "shared keys").wait();', "",
     "*TensorParallelLlama*")
flat("partial_gradients.cpp", "if (rank % together == 0) groups.emplace_back();",
     "if (rank < together) groups.emplace_back();", "*TensorParallelLlama*")
# A norm of heads sees a rank's own heads
flat("partial_gradients.cpp", 'sum_gradients(tp_, norms, "norms of heads");', "",
     "*TensorParallelLlama*")
# An output layer of its own is cut by rows, too, and padded
flat("megatron_layers.cpp", " || layer == leaf_name(names.output())", "",
     "*TensorParallelLlama*")
chapter("common/sharded", "tensor_parallel")(
    "parts.cpp", ' || name == "lm_head.weight"', "", "*TensorParallelLlama*")
# The norm counts shared columns once
folder("core", "tensor_parallel")(
    "shards.cpp", "if (is_first) append", "append", "*TensorParallelLlama*")
flat("rng.cpp", "seeds.tensor = base + 2718 + offset(place.tp);",
     "seeds.tensor = base + 2718;", "*Rng*:*Stream*")
flat("recompute.cpp", "const Replay replay(*rng, streams);", "",
     "*DistributedInputs*:*Rng*")
flat("bill.cpp", "kept_by_block(padded, kept) / sizes.t +",
     "kept_by_block(padded, kept) +", "*DistributedInputs*")
flat("bill.cpp", "std::max(c, a);", "c + a;", "TensorParallelBill.*")

# --- 08 -----------------------------------------------------------------------

square = chapter("08_tensor_parallel_2d", "tensor_parallel_2d")
square("summa_layers.cpp",
       "embedding_part(rows, rows_of_depth(ids, grid), grid.i() * rows.size(0))",
       "embedding_part(rows, rows_of_depth(ids, grid), grid.j() * rows.size(0))",
       "*SummaLayers*")
square("summa_layers.cpp", "first = grid.j() * own;", "first = grid.i() * own;",
       "*SummaLayers*")
square("operators.cpp", "{b * at.row, own.heads * at.column, 0, 0},",
       "{b * at.row, own.heads * at.row, 0, 0},", "*SummaGpt*")
square("operators.cpp",
       "sub(means.rows_view(1, 2), square(mean));", "means.rows_view(1, 2);",
       "*SummaLayers*")
square("operators.cpp",
       "const Tensor dz = mul(dy, widened(gamma));\n          const Tensor means",
       "const Tensor dz = dy;\n          const Tensor means", "*SummaLayers*")
# The mean of a rank's own columns
square("operators.cpp", "return scale(row_sums({matrix}, group), 1 / width);",
       "return scale(reshape(sum(matrix, 1), {1, matrix.size(0)}),\n"
       "                 group.size() / width);", "*SummaLayers*")
square("operators.cpp", "mul(sub(dz, mul(xhat, along)), column(rstd));",
       "mul(dz, column(rstd));", "*SummaLayers*")
# A sum that is not complete
square("products.cpp", "for (Work& work : works_) work.wait();",
       "works_[0].wait();", "*Summa*")
square("products.cpp", "/*from_zero=*/t == 0,", "/*from_zero=*/true,",
       "*Summa*")
square("operators.cpp", "view.offset.front() = at.row * x.size(0);",
       "view.offset.front() = at.column * x.size(0);", "*SummaGpt*")
square("bill.cpp", "const double gathered = s.q > 1 ? e / s.q : 0;",
       "const double gathered = e / s.q;", "SummaBill.*")
# A Llama: one cut through [gate | up] and [q | k | v], heads of all ranks
square("grid.cpp", "cut_columns(1, place.j, place.q, columns)};",
       "cut_columns(1, place.j, place.q, {})};", "*SummaGpt*")
square("grid.cpp", "return {cut_columns(dim, place.j, place.q, columns),",
       "return {cut_columns(dim, place.j, place.q, {}),", "*SummaGpt*")
square("summa_layers.cpp", "made.head_ranks = grid.q();", "", "*SummaGpt*")
# Each rank normalises its own heads of its own rows
square("part_layers.cpp", 'sum_gradients(world, norms, "norms of heads");', "",
       "*SummaGpt*")
square("summa_strategy.cpp", "sum_head_norms(config, world)};",
       "sum_head_norms(config, *grid.row)};", "*SummaGpt*")
chapter("common/sharded", "tensor_parallel_2d")(
    "parts.cpp", "if (!are_shared) continue;",
    "if (shard.columns.empty()) continue;", "*SummaGpt*")
square("summa_strategy.cpp",
       "check_divides(model + \"num_key_value_heads\", config.llama.kv_heads,\n"
       "                  parts.columns, \"heads of keys are cut into\");", "",
       "SummaBill.Refuses*")
square("bill.cpp", "double vectors() const { return block.norm_1.parameters() / h; }",
       "double vectors() const { return 2; }", "SummaBill.*")
square("bill.cpp", "(of_heads > 0 ? all_reduce(ranks, of_heads * s.element) : 0) +",
       "", "SummaBill.*")
square("bill.cpp", "return cut / (s.q * s.q) + whole;",
       "return (cut + whole) / (s.q * s.q);", "SummaBill.*")
square("bill.cpp", "return arrives + (q - 1) * std::max(arrives, g) + g;",
       "return q * (arrives + g);", "SummaBill.*")

# --- 09 -----------------------------------------------------------------------

stacked = chapter("08_tensor_parallel_2d", "tensor_parallel_2p5d")
# Each depth trains a model of its own
stacked("operators.cpp", "group->all_reduce(grads[0]).wait();", "",
        "*Tesseract*")
stacked("summa_layers.cpp", "const Tensor w = replicated(weight, grid.depth);\n  const Tensor b",
        "const Tensor w = weight;\n  const Tensor b", "*Tesseract*")
stacked("grid.h", "int row_part() const { return k() * q() + i(); }",
        "int row_part() const { return i() * d() + k(); }", "*Tesseract*")
stacked("grid.cpp", 'grid.batch = &mesh.group("dep-col");', "", "*Tesseract*")
chapter("09_tensor_parallel_2p5d", "tensor_parallel_2p5d")(
    "tesseract.cpp", 'Topology({"dep", "col", "row"}, {depth, q, q});',
    'Topology({"col", "row", "dep"}, {q, q, depth});', "*Tesseract*")

# --- 10 -----------------------------------------------------------------------

cube = chapter("10_tensor_parallel_3d", "tensor_parallel_3d")
cube("cube.cpp",
     "{{0, place.j, place.l}, {0, place.i, place.l}, {1, place.k, place.l}}",
     "{{0, place.i, place.l}, {0, place.j, place.l}, {1, place.k, place.l}}",
     "*Cube*")
cube("cube.cpp", "cube.swapped = {&k, &j, &i, &ik, &ij};",
     "cube.swapped = {&j, &k, &i, &ij, &ik};", "*Cube*")
cube("cube_layers.cpp", "return with_layout(y, swapped(layout));\n}\n\nTensor linear",
     "return with_layout(y, layout);\n}\n\nTensor linear", "*Cube*")
cube("cube_layers.cpp",
     "add(y, replicated(bias, cube.roles(layout).output_weight));",
     "add(y, bias);", "*Cube*")
cube("cube_layers.cpp", "embedding_part(block, own, cube.place.j * block.size(0))",
     "embedding_part(block, own, cube.place.k * block.size(0))", "*Cube*")
cube("cube_layers.cpp",
     "split_rms_norm(x, replicated(gamma, roles.input_weight),\n"
     "                                    *roles.output, eps),",
     "split_rms_norm(x, replicated(gamma, roles.input_weight),\n"
     "                                    *roles.input, eps),", "*CubeLayers*")
cube("cube_layers.cpp", "made.head_ranks = cube.l();", "",
     "DimensionsTraining.ALlama*")
cube("cube_strategy.cpp", "summa::sum_head_norms(config, world)};", "{}};",
     "DimensionsTraining.ALlama*")
cube("bill.cpp", "s.tables * s.vocabulary * s.h;", "s.vocabulary * s.h;",
     "CubeBill.*")
cube("cube.h", "return {i * l + column_part(swapped(layout)), l * l,",
     "return {i * l, l * l,", "*Cube*")
cube("cube_layers.cpp", "InFlight::scatter(dw, *roles.weight).wait();",
     "InFlight::scatter(dw, *roles.output).wait();", "*Cube*")
cube("bill.cpp", "double block = keeps ? gathered : 0;",
     "double block = gathered;", "CubeBill.*")
cube("bill.cpp", "return dx + std::max(g, x) + w;", "return dx + g + x + w;",
     "CubeBill.*")

# --- 11 -----------------------------------------------------------------------

dtensor = chapter("11_dtensor", "dtensor")
GRAPHS = "*DTensorProperty*:DTensor*"
dtensor("propagation.cpp", "grad = scale(grad, static_cast<double>(ranks));", "",
        GRAPHS)
dtensor("propagation.cpp", "placements[axis] = partial();", "", GRAPHS)
dtensor("redistribute.cpp",
        "return from.op == PartialOp::kAvg ? scale(reduced, 1 / ranks) : reduced;",
        "return reduced;", GRAPHS + ":*Redistribute*")
dtensor("moves.cpp",
        "move(axis, must_open ? replicate() : to[axis]);",
        "move(axis, to[axis]);", GRAPHS + ":*Redistribute*")
dtensor("redistribute.cpp", "return cut(mine, dim, 0, part.size);\n  }\n\n  //",
        "return mine;\n  }\n\n  //", GRAPHS + ":*Redistribute*")
dtensor("dtensor_ops_reduce.cpp", "loss(x, Reduction::kSum)",
        "loss(x, Reduction::kMean)", "DTensorLoss.*:DTensor*")
dtensor("dtensor_ops_reduce.cpp", "cross_entropy_part(x[0], x[1], first,",
        "cross_entropy_part(x[0], x[1], 0,", "DTensorLoss.*")
dtensor("dtensor_ops_reduce.cpp", "(axes == 1 && ceil_part(",
        "(axes == 1 || ceil_part(", "*DTensorEmptyShards*:*DTensorProperty*")
# Positions that start at 0 on every rank; a table that is cut unevenly
dtensor("dtensor_strategy.cpp",
        "is_cut ? cut_tensor(all, tp, {shard(0)}).to_local() : all;",
        "slice(all, 0, 0, all.size(0) / (is_cut ? tp.shape()[0] : 1));",
        "*DTensorTraining*")
dtensor("dtensor_layout.cpp", "return {{0, index, t, 1, config.vocab_size}};",
        "return {{0, index, t}};", "*DTensorTraining*")
dtensor("dtensor_strategy.cpp",
        "over_dp[at(\"dp\")] * t + over_tp[at(\"tp\")];",
        "over_dp[at(\"dp\")] + over_tp[at(\"tp\")];",
        "*DTensorTraining*")
dtensor("bill.cpp", "s.positions > 0) summed += s.seq", "false) summed += s.seq",
        "*DTensorTraining*")
dtensor("bill.cpp", "if (part.bias) all.push_back({h, layers});", "",
        "*DTensorTraining*")
dtensor("layout_hooks.cpp", ".to_local({partial()});\n    });\n  }\n  if",
        ".to_local();\n    });\n  }\n  if", "*Training*:DTensor*")
dtensor("dtensor_strategy.cpp",
        "layers.head_rank = static_cast<int>(tp.coordinate()[0]);", "",
        "*DTensorTraining*")

# FSDP gathers parts of equal lengths; the table's second use
dtensor("bill.cpp", "elements(all, padded) +", "elements(all, own) +",
        "*DTensorTraining*")
dtensor("bill.cpp", "? used(times.vocabulary, times.h) : 0", "? 0 : 0",
        "*DTensorTraining*:*Textbook*")

# --- 12 -----------------------------------------------------------------------

sequence = chapter("12_sequence_parallel", "sequence_parallel")
sequence("ring_exchange.h", "return (rank - step + c) % c;", "return (rank + step) % c;",
         "*Ring*:*Rsa*")
sequence("ring_attention.cpp", "add_into(own[1], earlier[1]);", "", "*Ring*")
sequence("sequence_layout.cpp", "if (source < rank) return {{all, {0, n / 2}, false, 0}};",
         "if (source < rank) return {{all, all, false, 0}};", "*Ring*:*Layout*")
sequence("ring_self_attention.cpp", "source * n, (source + 1) * n);\n}",
         "(rows.size(2) / n - 1 - source) * n,\n"
         "               (rows.size(2) / n - source) * n);\n}", "*Rsa*:*Ring*")
sequence("ulysses.cpp",
         "return reshape(permute(by_source, {1, 0, 2, 3}), {b, c * n, width});",
         "return reshape(by_source, {b, c * n, width});", "*Ulysses*")
sequence("ulysses.cpp", "{0, cp.rank() * own.heads, 0, 0}, {}};",
         "{0, 0, 0, 0}, {}};", "*Ulysses*:*Gpt*")
# A bias on every rank's part of a sum
sequence("megatron.cpp",
         "reduce_scatter_to(linear(x, weight), *tp_, kTokens);\n"
         "    return bias.defined() ? add(sum, bias) : sum;",
         "reduce_scatter_to(linear(x, weight, bias), *tp_, kTokens);\n"
         "    return sum;", "*Megatron*")
sequence("megatron.cpp", '"wpe.weight", ', "", "*Megatron*")
# Of a Llama: norms see a rank's own tokens, norms of heads its own heads
sequence("megatron.cpp", '"layernorm.weight", ', "",
         "MegatronStrategy.*ForALlama")
sequence("sequence_strategy.cpp", "    of_heads->sum(parameters);\n", "",
         "MegatronStrategy.*ForALlama")
# Dropout keeps rows of scores before and after it
sequence("bill.cpp", "const double copies = own.dropout > 0 ? 2 : 1;",
         "const double copies = 1;", "*SequenceTraining*")
sequence("bill.cpp", "std::max(5 * other, sums) + sums;",
         "std::max(5 * other, sums);", "TextbookSequence.*")
# Angles: positions that start at 0 on every rank; another layout's
sequence("gpt_layers.cpp",
         "return positions(place.layout, place.rank, place.c, own * place.c);",
         "return positions(place.layout, 0, 1, own);", "SequenceLlama.*")
sequence("gpt_layers.cpp",
         "return positions(place.layout, place.rank, place.c, own * place.c);",
         "return positions(Layout::kContiguous, place.rank, place.c,\n"
         "                     own * place.c);", "SequenceLlama.*")
# Right numbers, but a / k times as many bytes
sequence("gpt_layers.cpp",
         "return ring_attention(q, k, v, {options, setup.layout}, cp);",
         "{\n"
         "        AttentionOptions repeated = options;\n"
         "        repeated.kv_heads = 0;\n"
         "        const auto repeat = [&](const Tensor& x) {\n"
         "          const std::int64_t times = options.heads / kv_heads;\n"
         "          const Shape one = {x.size(0), x.size(1), kv_heads, 1,\n"
         "                             x.size(2) / kv_heads};\n"
         "          const Tensors copies(static_cast<std::size_t>(times),\n"
         "                               reshape(x, one));\n"
         "          return reshape(concat(copies, 3),\n"
         "                         {x.size(0), x.size(1), times * x.size(2)});\n"
         "        };\n"
         "        return ring_attention(q, repeat(k), repeat(v),\n"
         "                              {repeated, setup.layout}, cp);\n"
         "      }", "SequenceLlama.*")
# Keys are shared by neighbours
sequence("ring_self_attention.cpp",
         "return reshape(x, {keys, x.size(0) / keys * x.size(1), x.size(2)});",
         "const std::int64_t times = x.size(0) / keys;\n"
         "  return reshape(permute(reshape(x, {times, keys, x.size(1), x.size(2)}),\n"
         "                         {1, 0, 2, 3}),\n"
         "                 {keys, times * x.size(1), x.size(2)});", "*Rsa*")
sequence("bill.cpp", "? std::lcm(heads, c) : heads;", "? heads : heads;",
         "SequenceLlama.*")
sequence("bill.cpp", "(z.queries + copies) * z.element;",
         "(z.h + copies) * z.element;", "SequenceLlama.*")
sequence("bill.cpp", "all_gather(c, part * kv_share));", "all_gather(c, part));",
         "SequenceLlama.*:TextbookSequence.*")
sequence("bill.cpp", "const double sums = 2 * textbook::message(part_of_sums * kv_share);",
         "const double sums = 2 * textbook::message(part_of_sums);",
         "TextbookSequence.*")

# --- 13 -----------------------------------------------------------------------

moe = chapter("13_moe", "moe")
# Experts divided by the ranks that sum them, not by all that have tokens
moe("expert_update.cpp", "part.tensors, part.group.label, share);",
    "part.tensors, part.group.label,\n"
    "                  1.0 / part.group.replicas.size());",
    "MoeTraps.*:*MoeForms*")
moe("expert_update.cpp",
    "const double left = static_cast<double>(dp_) / part.group.replicas.size();",
    "const double left = 1;", "MoeTraps.*:*MoeForms*")
# Losses of the gate count m times
moe("moe_strategy.cpp",
    "record_->loss_scale = scale / static_cast<double>(setup_.micro_batches);",
    "record_->loss_scale = scale;", "*MoeForms*")
# The norm counts what TP does not cut t times
moe("moe_strategy.cpp",
    'if (mesh_.coordinate("tp") == 0) return true;', "return true;",
    "*MoeForms*")
# Ranks of TP with experts of their own slots are not summed
moe("moe_strategy.cpp", ': mesh.group("edp-tp")),', ': mesh.group("edp")),',
    "*MoeForms*")
moe("routing.cpp", "std::ceil(even - 1e-6)",
    "std::ceil(static_cast<float>(even) + 1e-6)", "Capacity.*")
moe("routing.cpp", "keep_first(routing, /*by_choice=*/true);",
    "keep_first(routing, /*by_choice=*/false);", "TopTwo.*")
moe("routing.cpp",
    "random_.batch.first + token / per_row_ * random_.batch.stride",
    "token / per_row_", "TokenDraws.*:*MoeForms*")
# Weights are not shares of the kept choices
moe("gate.cpp", "(!is_dropless && routing.slot[choice] < 0)", "false",
    "*GateWeights*")
# The loss is a mean
cifar = chapter("15_engine", "engine")
cifar("cifar_strategy.cpp", "loss.item() / world_.size()", "loss.item()",
      "*CifarRanks*")
# f16: the one device has another scale
cifar("cifar_strategy.cpp", "is_f16 ? scaler.scale() / divisor : 1",
      "is_f16 ? scaler.scale() / ranks : 1", "*CifarRanks.SkipsSteps*")
# Images that fill the last batch count
cifar("cifar_strategy.cpp", "i < kTestBatch && first + i < n;",
      "i < kTestBatch;", "Cifar.EveryImage*")
cifar("cifar_options.cpp", '"warmup_num_steps": 1000', '"warmup_num_steps": 999',
      "Cifar.Losses*")
# Rows stay in the order of the ranks that they come from
moe("dispatch.cpp", "permute(reshape(arrived, {p, local, c, m}), {1, 0, 2, 3})",
    "arrived", "*MoeLayerOnRanks*")
# The bill: hidden units beside the experts
moe("activations.cpp", "double beside = has_mlp_beside(moe) ? 8 * h / z.t : 0;",
    "double beside = 0;", "MoeBill.*")
moe("bill.cpp", "2 * exchange() + 2 * expert() + gather()",
    "exchange() + 2 * expert() + gather()", "MoeBill.*")

"""What a reader meant by a line that the compiler refuses: often PyTorch's."""

import re

COLLECTIVES = "all_reduce|reduce_scatter|all_gather|broadcast|reduce|scatter|" \
              "gather|all_to_all|send|recv"
FUNCTIONS = "add|sub|mul|div|neg|abs|exp|log|sqrt|square|sum|mean|matmul|" \
            "relu|gelu|tanh|sigmoid|softmax|log_softmax|reshape"
ON_A_GROUP = "a collective is a call on a group, as in " \
             "dp.all_reduce(x, ReduceOp::kSum).wait()"
SCALE_INTO = "scale_into(x, x, factor) multiplies x in place; to divide by n, " \
             "the factor is 1.0 / n"
ADD_INTO = "add_into(x, z) adds z to x in place, add_into(x, z, -1) subtracts it"

# What is wrong, in the complaint of GCC or Clang or in the line below it, and
# what to write. The first row that fits counts.
MEANT = [
    (r"'(?:kAvg|kMean|AVG)'.*ReduceOp", "there is no average: scale_into(x, x, "
     "1.0 / n) first, then all_reduce with ReduceOp::kSum"),
    (r"'\w+'.*'shardbook::ReduceOp'|'(?:kSum|kMax|kMin|SUM|MAX|MIN)'",
     "write ReduceOp::kSum, ReduceOp::kMax or ReduceOp::kMin"),
    (r"nodiscard.*\n\W*(?:\d+ \| +)?scale\(",
     "scale(x, factor) returns a new tensor; scale_into(x, x, factor) changes x"),
    (r"nodiscard.*\n\W*(?:\d+ \| +)?add\(",
     "add(x, z) returns a new tensor; add_into(x, z) changes x"),
    (rf"nodiscard.*\n.*(?:\.|->)({COLLECTIVES})\(",
     r"\1 has only begun when it returns: add .wait(), or keep the Work that it "
     "returns, and wait later"),
    (r"nodiscard.*\n[^(]*?(\w+)\(",
     r"\1 returns a tensor, and changes none: give its result a name"),
    (r"named '(?:div|mul)_'|(?:operator|overloaded ')[*/]=", SCALE_INTO),
    (r"named '(?:add|sub)_'|(?:operator|overloaded ')[-+]=", ADD_INTO),
    (r"named '(zero|fill|copy)_'",
     "x.zero(), x.fill(value) and x.copy_from(z) change x in place"),
    (r"(?:operator[-+*/]'|binary expression|unary expression).*Tensor",
     "tensors have no operators: write add(x, z), sub(x, z), mul(x, z) or "
     "div(x, z), and scale(x, factor) where one is a number"),
    (r"operator\[\].*Tensor|Tensor.*subscript operator",
     "slice(x, dim, begin, end) takes a part of a tensor"),
    (r"\brequires_grad(?:_\(| *=[^=])",
     "x.set_requires_grad() asks for the gradient of x"),
    (r"member function '[^']*::(\w+)\(", r"\1 is a function: write \1()"),
    (r"(?:must be called|unresolved overloaded).*\n.*?\.([a-z]\w*)\b(?!\()",
     r"\1 is a function: write \1()"),
    (rf"\bdist(?:\.|::)|'(?:{COLLECTIVES})'(?: was not declared|\n)",
     ON_A_GROUP),
    (r"\b(?:torch|nn|F)(?:\.|::)",
     "operations are functions without a prefix, as in matmul(x, w); tensors are "
     "made as in Tensor::zeros({2, 3})"),
    (rf"named '({FUNCTIONS})'", r"\1 is a function: write \1(x, ...)"),
    (r"named '(?:view|flatten)'", "reshape(x, {2, 3}) gives x another shape"),
    (r"named '(?:t|T|mT|transpose)'",
     "transpose(x, 0, 1) exchanges dims, and matmul can read x as transposed"),
    (r"named 'to'",
     "to_dtype(x, DType::kF64) converts x, to_device(x, device) moves it"),
    (r"named 'zero_grad'", "model.clear_grad() forgets all gradients"),
    (r"named '(?:get_rank|(?:get_)?world_size)'",
     "dp.size() is the number of a group's ranks, dp.rank() this one's number"),
    (r"named 'i(send|recv)'", r"\1 itself returns at once; .wait() ends it"),
    (r"Tensor::(?:zeros|empty|full)\(\d",
     "a shape is a list: Tensor::zeros({2, 3})"),
]


def meant(output):
    """What to write instead: a sentence for each complaint that is known."""
    output = output.translate({ord("‘"): "'", ord("’"): "'"})
    sentences = []
    for complaint in re.findall(r" error: .*\n.*", output):
        fits = (re.search(pattern, complaint) for pattern, _ in MEANT)
        sentences += next(([fit.expand(sentence)] for fit, (_, sentence)
                           in zip(fits, MEANT) if fit), [])
    return list(dict.fromkeys(sentences))

#include "chapters/common/models/internal/counted_families.h"

#include <algorithm>
#include <sstream>

namespace shardbook::counted_families {
namespace {

// A row: a type, the row that it is based on, and the numbers in which it differs.
// The classes of transformers 5.24 with their defaults, and at the end two with
// code of their own. Numbers:
//
//   vocab hidden layers heads kv (heads of keys) head (its width) positions
//   bias              of q, k, v and o; or q_bias (of q, k, v) and o_bias
//   norm, norm_bias   norms have weights, biases; `norms` of them in a block
//   qk_norm           of queries and keys: over a head, or (qk_whole) over all
//   mlp, gated        width of a dense MLP; [gate | up] rather than up alone
//   tied, head_bias   of the output layer
//   table_rows        of the position table; table_width of the token table
//   window, chunked   of the layers that `types` names; else of those from
//                     `from` up to `until`, all but every `pattern`-th
//   square            heads have to fill the hidden size
//   experts chosen expert   their number, those of a token, their width; in
//                     layers from `first` to `last`, every `step`-th, or in those
//                     of expert_list; in none of dense_list
//   shared            width of the shared experts
//   kv_rank q_rank nope rope value   of multi-head latent attention
//   window_sinks      sinks, in layers with a window alone
//   full_head full_kv, k_is_v   of layers without a window: their heads, and
//                     whether keys are the values, too
//   shared_kv, wide   layers at the end that have the keys of earlier ones, and
//                     whether their MLPs are twice as wide
//   beside            blocks with experts have a dense MLP as well, with norms of
//                     its own, and their router scales
//   per_layer         width of a second embedding, which each layer adds
//   index_heads index_head selected   of an indexer, and how many tokens it leaves
//                     to attention; in the layers of index_list, or every
//                     index_step-th from index_offset - 1
constexpr char kRows[] = R"(
decoder - vocab=vocab_size hidden=hidden_size layers=num_hidden_layers
  heads=num_attention_heads kv=num_key_value_heads?heads:heads
  head=head_dim:hidden/heads positions=max_position_embeddings bias:0
  q_bias:bias o_bias:bias norm:1 norm_bias:0 norms:2 final_norm:1
  embedding_norm:0 qk_norm:0 qk_whole:0 qk_norm_bias:0 sinks:0
  mlp=intermediate_size gated:1 mlp_bias:0 tied=tie_word_embeddings:no
  head_bias:0 table_rows:0 table_width:hidden window:0 chunked:0 pattern:0
  from:0 until:layers experts:0 chosen:0 expert:0 shared:0 shared_gate:0
  router_bias:0 expert_bias:0 first:0 last:0-1 step:1 square:0 kv_rank:0
  q_rank:0 nope:0 rope:0 value:0 full_head:head full_kv:kv k_is_v:0
  last_full:0 shared_kv:0 wide:0 beside:0 per_layer:0 per_layer_rows:0
  window_sinks:0 index_heads:0 index_head:0 selected:0 index_step:1
  index_offset:2 !is_encoder_decoder=false
  !add_cross_attention=false
classic decoder kv=:heads head=:hidden/heads bias:1 norm_bias:1 gated:0
  mlp_bias:1 mlp=:4*hidden
gpt_neox classic vocab:50432 hidden:6144 layers:44 heads:64 positions:2048
  mlp=intermediate_size:24576 bias=attention_bias:yes ~use_parallel_residual
gptj classic vocab:50400 hidden=n_embd|hidden_size:4096
  layers=n_layer|num_hidden_layers:28 heads=n_head|num_attention_heads:16
  positions=n_positions|max_position_embeddings:2048
  mlp=n_inner?4*hidden:4*hidden bias:0 norms:1 head_bias:1
codegen gptj positions=n_positions|max_position_embeddings:2048
gpt_bigcode gptj vocab:50257 hidden:768 layers:12 heads:12 positions:1024
  bias:1 norms:2 head_bias:0 table_rows:positions tied:yes one=multi_query:yes
  kv:one(1,heads) ~num_key_value_heads
gpt2 gpt_bigcode one= kv=:heads
gpt_neo classic vocab:50257 hidden:2048 layers=num_layers|num_hidden_layers:24
  heads=num_heads|num_attention_heads:16 positions:2048
  mlp=intermediate_size?4*hidden:4*hidden table_rows:positions tied:yes
  q_bias:0 window=window_size:256
  types=attention_types?:[[["global","local"],12]]
opt classic vocab:50272 hidden:768 layers:12 heads:12 positions:2048
  mlp=ffn_dim:3072 tied:yes bias=enable_bias:yes mlp_bias:bias
  table_rows:positions+2 table_width=word_embed_proj_dim?hidden:hidden
  norm=layer_norm_elementwise_affine:yes final_norm=do_layer_norm_before:yes
bloom classic vocab:250880 hidden=hidden_size|n_embed:64
  layers=n_layer|num_hidden_layers:2 heads=n_head|num_attention_heads:8
  positions=seq_length:2048 tied:yes embedding_norm:1
falcon classic vocab:65024 hidden=hidden_size|n_embed:4544
  layers=num_hidden_layers|n_layer:32 heads=num_attention_heads|n_head:71
  positions:2048 tied:yes mlp=ffn_hidden_size?4*hidden:4*hidden bias=bias?no:no
  mlp_bias:bias new=new_decoder_architecture?no:no one=multi_query?no:yes
  parallel=parallel_attn?no:yes groups=num_kv_heads?heads:heads
  kv:new(groups,one(1,heads)) lns=num_ln_in_parallel_attn?new+1:new+1
  norms:parallel(lns,2)
mpt classic vocab:50368 hidden=d_model:2048 layers=n_layers:24 heads=n_heads:16
  positions=max_seq_len:2048 tied:yes bias:0 norm_bias:0 mlp_bias:0
  !no_bias=true !expansion_ratio=4 !attn_config.qk_ln=false
  !attn_config.attn_type="multihead_attention"
phi classic vocab:51200 hidden:2048 layers:24 heads:32 positions:2048
  kv=num_key_value_heads?heads:heads head=head_dim:hidden/heads
  mlp=intermediate_size:8192 norms:1 head_bias:1 qk_norm=qk_layernorm:no
  qk_norm_bias:1
phi3 decoder vocab:32064 hidden:3072 layers:32 heads:32 positions:4096 mlp:8192
  window=sliding_window?0:0
phimoe decoder vocab:32064 hidden:4096 layers:32 heads:32
  kv=num_key_value_heads:8 positions:131072 bias=attention_bias:no norm_bias:1
  head_bias=lm_head_bias:no window=sliding_window?0:0
  expert=intermediate_size:6400 mlp=:expert experts=num_local_experts:16
  chosen=num_experts_per_tok:2
stablelm decoder vocab:50304 hidden:2560 layers:32 heads:32
  kv=num_key_value_heads:32 head=:hidden/heads positions:4096 mlp:6912
  norm_bias:1 q_bias=use_qkv_bias:no qk_norm=qk_layernorm:no qk_whole:1
  parallel=use_parallel_residual:no norms:2-parallel
starcoder2 decoder vocab:49152 hidden:3072 layers:30 heads:24
  kv=num_key_value_heads:2 positions:4096 mlp:12288 gated:0 norm_bias:1
  tied:yes bias=use_bias:yes mlp_bias:bias window=sliding_window?0:0
gemma decoder vocab:256000 hidden:3072 layers:28 heads:16
  kv=num_key_value_heads:16 head=head_dim:256 positions:8192 mlp:24576 tied:yes
  bias=attention_bias:no !use_bidirectional_attention=false|null
gemma2 gemma hidden:2304 layers:26 heads:8 kv:4 mlp:9216 norms:4
  window=sliding_window?0:4096 pattern:2 types=layer_types
gemma3_text gemma2 vocab:262208 positions:131072 qk_norm:1
  pattern=sliding_window_pattern|_sliding_window_pattern:6
gemma4_text gemma vocab:262144 hidden:2304 layers:30 heads:8
  kv=num_key_value_heads:4 positions:131072 mlp:9216 norms:4 qk_norm:1
  window=sliding_window:512
  pattern:6 types=layer_types last_full:1 full_head=global_head_dim:512
  k_is_v=attention_k_eq_v:no global_kv=num_global_key_value_heads?kv:kv
  full_kv:k_is_v(global_kv,kv) shared_kv=num_kv_shared_layers:0
  wide=use_double_wide_mlp:no per_layer=hidden_size_per_layer_input:256
  per_layer_rows=vocab_size_per_layer_input:262144 beside=enable_moe_block:no
  most_experts=num_experts?0:0 experts:beside(most_experts,0)
  most_chosen=top_k_experts?0:0 chosen:beside(most_chosen,0)
  most_expert=moe_intermediate_size?0:0 expert:beside(most_expert,0)
  !use_bidirectional_attention="vision"|null !expert_intermediate_size=null
olmo decoder vocab:50304 hidden:4096 layers:32 heads:32 positions:2048
  mlp:11008 norm:0 bias=attention_bias:no
olmo2 olmo norm:1 qk_norm:1 qk_whole:1
olmo3 olmo2 window=sliding_window?0:4096 pattern:4 types=layer_types
olmoe olmo2 hidden:2048 layers:16 heads:16 head=:hidden/heads positions:4096
  expert=intermediate_size:2048 mlp=:expert experts=num_experts:64
  chosen=num_experts_per_tok:8
cohere decoder vocab:256000 hidden:8192 layers:40 heads:64 positions:8192
  mlp:22528 norms:1 tied:yes bias=attention_bias:no qk_norm=use_qk_norm:no
  qk_whole:1
cohere2 cohere qk_norm=:0 window=sliding_window?0:4096
  pattern=sliding_window_pattern|layer_switch:4 types=layer_types
granite decoder vocab:32000 hidden:4096 layers:32 heads:32 positions:2048
  mlp:11008 bias=attention_bias:no mlp_bias=mlp_bias:no
granitemoe granite head=:hidden/heads mlp_bias=:0
  expert=intermediate_size:11008 mlp=:expert experts=num_local_experts:8
  chosen=num_experts_per_tok:2
granitemoeshared granitemoe shared=shared_intermediate_size:0
arcee granite hidden:2560 positions:4096 mlp:18432 gated:0
  head=head_dim?hidden/heads:hidden/heads
helium granite vocab:48000 hidden:2560 layers:24 heads:20
  kv=num_key_value_heads:20 head=head_dim:128 positions:4096 mlp:7040 o_bias:0
  square:1
seed_oss granite vocab:155136 layers:64 heads:80 kv:8
  head=head_dim?hidden/heads:128 positions:524288 mlp:27648
  bias=attention_bias:yes o_bias=attention_out_bias:no
hunyuan_v1_dense granite vocab:290943 head=head_dim: mlp_bias=:0 qk_norm:1
glm decoder vocab:151552 hidden:4096 layers:40 heads:32
  kv=num_key_value_heads:2 head=head_dim:128 positions:131072 mlp:13696
  bias=attention_bias:yes o_bias:0
glm4 glm norms:4
glm4_moe glm layers:46 heads:96 kv:8 head=head_dim:hidden/heads mlp:10944
  bias=attention_bias:no qk_norm=use_qk_norm:no experts=n_routed_experts:128
  chosen=num_experts_per_tok:8 expert=moe_intermediate_size:1408
  shared_number=n_shared_experts:1 shared:shared_number*expert
  first=first_k_dense_replace:1
dots1 glm4_moe vocab:152064 hidden:4608 layers:62 heads:32
  kv=num_key_value_heads?heads:32 positions:2048 qk_norm=:1 o_bias:bias
  experts=n_routed_experts: chosen=num_experts_per_tok:
  shared_number=n_shared_experts: first:0 window=sliding_window?0:4096
  from=max_window_layers:62 types=layer_types
nemotron decoder vocab:256000 hidden:6144 layers:32 heads:48 positions:4096
  mlp:24576 head=head_dim?hidden/heads:hidden/heads kv=num_key_value_heads:
  gated:0 norm_bias:1 bias=attention_bias:no mlp_bias=mlp_bias:no
dbrx decoder vocab:32000 hidden=d_model:2048 layers=n_layers:24
  heads=n_heads:16 positions=max_seq_len:2048 kv=attn_config.kv_n_heads:1
  head=:hidden/heads expert=ffn_config.ffn_hidden_size:3584 mlp=:expert
  experts=ffn_config.moe_num_experts:4 chosen=ffn_config.moe_top_k:1 tied=:0
  !tie_word_embeddings=false ~num_key_value_heads
deepseek_v3 decoder vocab:129280 hidden:7168 layers:61 heads:128 kv=:heads
  head=:nope+rope positions:4096 mlp:18432 bias=attention_bias:no
  kv_rank=kv_lora_rank:512 q_rank=q_lora_rank?0:1536 nope=qk_nope_head_dim:128
  rope=qk_rope_head_dim:64 value=v_head_dim:128 experts=n_routed_experts:256
  chosen=num_experts_per_tok:8 expert=moe_intermediate_size:2048
  shared_number=n_shared_experts:1 shared:shared_number*expert
  first=first_k_dense_replace:3 !moe_layer_freq=1 ~head_dim
  ~num_key_value_heads
kimi_k2 deepseek_v3 vocab:129280
deepseek_v32 deepseek_v3 positions:163840 ~mlp_bias
  experts=num_experts|n_routed_experts:256
  given_kv=num_key_value_heads:heads given_head=head_dim:64
  q_rank=q_lora_rank:1536
  index_heads=index_n_heads:64 index_head=index_head_dim:128
  selected=index_topk:2048 sparse_list=mlp_layer_types
  !layer_types=each:["indexed_attention","deepseek_sparse_attention"]|null
glm_moe_dsa deepseek_v32 vocab:154880 hidden:6144 layers:78 heads:64
  positions:202752 mlp:12288 q_rank:2048 nope:192 value:256 index_heads:32
  index_list=indexer_types index_step=index_topk_freq:1
  index_offset=index_skip_topk_offset:2 !index_topk_pattern=null
deepseek_v2 deepseek_v3 vocab:102400 hidden:4096 layers:32 heads:32
  positions:2048 mlp:11008 mlp_bias=mlp_bias:no experts:64
  chosen=num_experts_per_tok: expert:1407 shared_number:2 first:0
qwen2_moe decoder vocab:151936 hidden:2048 layers:24 heads:16
  kv=num_key_value_heads:16 positions:32768 mlp:5632 q_bias=qkv_bias:yes
  experts=num_experts:60 chosen=num_experts_per_tok:4
  expert=moe_intermediate_size:1408 shared=shared_expert_intermediate_size:5632
  shared_gate:1 step=decoder_sparse_step:1 dense_list=mlp_only_layers
  slides=use_sliding_window:no most=sliding_window?0:4096 window:slides(most,0)
  pattern:2 until=max_window_layers:28 types=layer_types
gpt_oss decoder vocab:201088 hidden:2880 layers:36 heads:64
  kv=num_key_value_heads:8 head=head_dim:64 positions:131072
  bias=attention_bias:yes sinks:1 window_sinks:1
  window=sliding_window?0:128 pattern:2
  types=layer_types expert=intermediate_size:2880 mlp=:expert
  experts=num_local_experts:128 chosen=num_experts_per_tok:4 router_bias:1
  expert_bias:1
smollm3 granite vocab:128256 hidden:2048 layers:36 heads:16 kv:4
  positions:32768 tied:yes !use_sliding_window=false types=layer_types
  ~sliding_window ~no_rope_layers ~no_rope_layer_interval
ernie4_5 decoder vocab:103424 hidden:1024 layers:18 heads:16 kv:2
  head=head_dim?hidden/heads:128 positions:131072 mlp:3072 tied:yes
  bias=use_bias?no:no mlp_bias:bias
ernie4_5_moe ernie4_5 hidden:2560 layers:28 heads:20 kv=num_key_value_heads:4
  mlp:12288 head=head_dim:hidden/heads head_bias:bias router_bias:1
  experts=moe_num_experts|num_experts:64 chosen=moe_k|num_experts_per_tok:6
  expert=moe_intermediate_size:1536 shared_number=moe_num_shared_experts:2
  shared:shared_number*expert first=moe_layer_start_index:1
  last=moe_layer_end_index step=moe_layer_interval:1
exaone4 decoder vocab:102400 hidden:4096 layers:32 heads:32
  kv=num_key_value_heads:32 positions:2048 mlp:16384 qk_norm:1
  window=sliding_window?0:4096 pattern=sliding_window_pattern?0:4
  types=layer_types
ministral decoder vocab:32000 hidden:4096 layers:32 heads:32
  kv=num_key_value_heads:8 head=head_dim: positions:131072 mlp:14336
  window=sliding_window?0:4096 types=layer_types
ministral3 ministral vocab:131072 layers:34 head:128 positions:262144
  window=sliding_window?0:0 types=
minimax_m2 decoder vocab:200064 hidden:3072 layers:62 heads:48
  kv=num_key_value_heads:8 head=head_dim:128 positions:196608 qk_norm:1
  qk_whole:1 expert=intermediate_size:1536 mlp=:expert
  experts=num_local_experts:256 chosen=num_experts_per_tok:8
  !attn_type_list=each:[1] !use_qk_norm=true !qk_norm_type="per_layer"
  !shared_intermediate_size=0|null
llama4_text decoder vocab:202048 hidden:5120 layers:48 heads:40
  kv=num_key_value_heads:8 head=head_dim:128 positions:131072
  bias=attention_bias:no expert=intermediate_size:8192
  mlp=intermediate_size_mlp:16384 shared:expert experts=num_local_experts:16
  chosen=num_experts_per_tok:1 step=interleave_moe_layer_step:1
  expert_list=moe_layers window=attention_chunk_size?0:8192 chunked:1
  pattern=no_rope_layer_interval:4 slide_list=no_rope_layers types=layer_types
  ~use_qk_norm
qwen2_vl_text decoder vocab:152064 hidden:8192 layers:80 heads:64
  kv=num_key_value_heads?heads:8 positions:32768 mlp:29568 q_bias:1
  slides=use_sliding_window:no most=sliding_window?0:4096 window:slides(most,0)
  head=:hidden/heads from=max_window_layers:80 types=layer_types
qwen2_5_vl_text qwen2_vl_text vocab:152064
qwen3_vl_text decoder vocab:151936 hidden:4096 layers:32 heads:32
  kv=num_key_value_heads?heads:32 head=head_dim:128 positions:128000 mlp:22016
  bias=attention_bias:no qk_norm:1
qwen3_vl_moe_text qwen3_vl_text hidden:2048 layers:24 heads:16
  kv=num_key_value_heads:16 mlp:5632 experts=num_experts|num_local_experts:60
  ~sliding_window head=head_dim?hidden/heads:hidden/heads
  chosen=num_experts_per_tok:4 expert=moe_intermediate_size:1408
  step=decoder_sparse_step:1 dense_list=mlp_only_layers
mimo decoder vocab:151680 hidden: layers: heads:
  kv=num_key_value_heads?heads:heads head=head_dim:hidden/heads
  positions:32768 mlp: q_bias:1 !attention_bias=true !use_sliding_window=false
  ~sliding_window ~max_window_layers
mimo_v2_flash decoder vocab:152576 hidden:4096 layers:48 heads:64
  full_kv=num_key_value_heads:4 kv=:full_kv*2 head=head_dim:192
  value=v_head_dim:128 positions:131072 mlp:16384
  bias=attention_bias:no o_bias:0
  experts=n_routed_experts:256 chosen=num_experts_per_tok:8
  expert=moe_intermediate_size:2048 first:1 sparse_list=mlp_layer_types
  before=sliding_window_size?0:0 plain=sliding_window:129
  window:before(before+1,plain) window_sinks:1 from:1 pattern:6
  types=layer_types stated_slide_list=hybrid_layer_pattern
  stated_expert_list=moe_layer_freq !swa_num_attention_heads==heads
  !swa_num_key_value_heads==kv !swa_head_dim==head !swa_v_head_dim==value
  !add_swa_attention_sink_bias=true !add_full_attention_sink_bias=false
  ~attention_chunk_size
internlm2 decoder vocab:103168 hidden:4096 layers:32 heads:32
  head=:hidden/heads positions:2048 mlp:11008 bias=bias:yes
baichuan decoder vocab: hidden: layers: heads: kv=:heads head=:hidden/heads
  positions=max_position_embeddings|model_max_length:4096 mlp:
)";

/// "k|l": k and l.
std::vector<std::string> split(const std::string& text, char between) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, between);) {
    parts.push_back(part);
  }
  return parts;
}

/// "name=key|key?null:absent"; what is left out stays as in the base.
void add_number(const std::string& token, CountedClass& family) {
  if (token[0] == '~') {
    family.idle.push_back(token.substr(1));
    return;
  }
  if (token[0] == '!') {
    const std::size_t equals = token.find('=');
    family.fixed[token.substr(1, equals - 1)] = token.substr(equals + 1);
    return;
  }
  const std::size_t name_end = token.find_first_of("=?:");
  Number& number = family.numbers[token.substr(0, name_end)];
  const auto after = [&](char mark, const char* ends) -> std::string {
    const std::size_t begin = token.find(mark) + 1;
    return token.substr(begin, token.find_first_of(ends, begin) - begin);
  };
  const auto has = [&](char mark) {
    return token.find(mark) != std::string::npos;
  };
  if (has('=')) {
    number = {split(after('=', "?:"), '|'), false, "", number.absent};
  }
  if (has('?')) {
    number.may_be_null = true;
    number.if_null = after('?', ":");
  }
  if (has(':')) number.absent = after(':', "");
}

class Expression {
 public:
  using Lookup = std::function<std::int64_t(const std::string&)>;
  Expression(const std::string& text, const Lookup& number)
      : text_(text), number_(number) {}

  /// From left to right, up to a comma or a bracket.
  std::int64_t sum() {
    std::int64_t value = term();
    while (at_ < text_.size() && text_[at_] != ',' && text_[at_] != ')') {
      const char sign = text_[at_++];
      const std::int64_t next = term();
      if (sign == '+') value += next;
      if (sign == '-') value -= next;
      if (sign == '*') value *= next;
      if (sign == '/') value /= next;
    }
    return value;
  }

 private:
  std::int64_t term() {
    const std::size_t end =
        std::min(text_.find_first_of("+-*/(,)", at_), text_.size());
    const std::string word = text_.substr(at_, end - at_);
    at_ = end;
    if (word[0] >= '0' && word[0] <= '9') return std::stoll(word);
    if (word == "yes" || word == "no") return word == "yes" ? 1 : 0;
    if (at_ == text_.size() || text_[at_] != '(') return number_(word);
    // name(if on, if off)
    ++at_;
    const std::int64_t on = sum();
    ++at_;
    const std::int64_t off = sum();
    ++at_;
    return number_(word) != 0 ? on : off;
  }

  const std::string& text_;
  const Lookup& number_;
  std::size_t at_ = 0;
};

const std::map<std::string, CountedClass>& families() {
  static const std::map<std::string, CountedClass> kFamilies = [] {
    std::map<std::string, CountedClass> all;
    std::istringstream lines(kRows);
    CountedClass* family = nullptr;
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string word, base;
      if (!line.empty() && line[0] != ' ') {
        words >> word >> base;
        family = &all[word];
        if (base != "-") *family = all.at(base);
        family->type = word;
      }
      while (words >> word) add_number(word, *family);
    }
    all.erase("decoder");
    all.erase("classic");
    return all;
  }();
  return kFamilies;
}

}  // namespace

const std::vector<std::string>& types() {
  static const std::vector<std::string> kTypes = [] {
    std::vector<std::string> names;
    for (const auto& [type, family] : families()) names.push_back(type);
    return names;
  }();
  return kTypes;
}

std::int64_t evaluate(
    const std::string& text,
    const std::function<std::int64_t(const std::string& name)>& number) {
  return Expression(text, number).sum();
}

bool is_known(const std::string& type) { return families().count(type) > 0; }

const CountedClass& family_of(const std::string& type) {
  return families().at(type);
}

}  // namespace shardbook::counted_families

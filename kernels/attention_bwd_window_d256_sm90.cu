#include "attention_bwd_keys_sm90.cuh"
#include "attention_bwd_window_sm90.cuh"
#include "attention_sm90.h"

namespace frx {

void attention_backward_sm90_windows_d256(const AttentionBackwardParams& p, cudaStream_t stream) {
  // head dim, queries a tile, stages of Q and dO in turn; whether it makes dk, dv, dq, keeps ds
  using Keys = KeySideConfig<256, 64, 3, 0, false, true, false, true>;
  using Products = WindowConfig<256, 4>;
  AttentionBackwardParams dv_only = p;
  dv_only.dq_parts = nullptr;
  const int64_t all = key_blocks(p.sizes);
  CutKeys cut_keys = {};
  for (int64_t first = 0; first < all; first += p.windows.blocks) {
    const int64_t end = std::min(all, first + p.windows.blocks);
    const WindowCut& cut = end < all ? p.windows.cut : p.windows.last_cut;
    const KeyWindow window = {static_cast<int32_t>(first), static_cast<int32_t>(end), 1,
                              cut.first_split};
    run_backward_window<Keys>(p, window, cut, stream);
    cut_keys = cut_blocks(cut, window.first_block, window.end_block);
    // The next window's parts take the place of these. Those of the last one are summed with dq's.
    if (end < all && num_parts(cut_keys) > 0) {
      attention_backward_sm90_sum(dv_only, cut_keys, stream);
    }
    run_window_products<Products>(p, window, stream);
  }
  attention_backward_sm90_sum(p, cut_keys, stream);
}

}  // namespace frx

// The driver of the products: cuts rows × panels into tasks, tasks into tiles. Which thread runs a task, and where rows
// are cut, never changes a bit: a tile's result is defined row by row.
#include "ops/linear.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "core/isa.h"
#include "kernels/elementwise.h"
#include "kernels/linear.h"
#include "ops/elementwise.h"
#include "ops/owners.h"

namespace noria {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t panels_of(const PackedWeight& weight) { return ceil_div(weight.n, kPanel); }

// How rows × panels are shared out. Tasks of neighbouring index share panels, so that what one thread fetched of a
// weight is found in the shared cache by the next.
struct Cut {
  int64_t rows = 0, row_blocks = 1, panels = 0, panels_per_task = 1;
  int64_t tile_rows = 1;  // blocks begin on a multiple of it
  int owners = 1;         // threads that have rows, in row_blocks / owners blocks each; 1: all take what comes
  int64_t tasks() const { return row_blocks * ceil_div(panels, panels_per_task); }
  int64_t first_row(int64_t block) const {
    return block == row_blocks ? rows : rows * block / row_blocks / tile_rows * tile_rows;
  }
};

// A block's activations stay in the second-level cache beside one panel; a panel is read once per block.
constexpr int64_t kRowBlockBytes = 512 << 10;
// Tasks per thread: enough that the last ones end nearly together, and that others do what a descheduled thread leaves.
constexpr int64_t kTasksPerThread = 12;
// Fewer multiply-adds are not worth a task of their own (some microseconds).
constexpr int64_t kLeastProducts = 1 << 20;

// Tiles this tall are matrix registers: filled up one by one, since their cost follows the tiles and shaping them differently
// costs more than a short last one. Others are made as even as can be: two of 4 rows beat one of 6 and one of 2.
bool whole_tiles(int most) { return most >= 16; }

// The tallest tile that a product uses, and the fewest rows worth a block of their own.
struct Height {
  int tile_rows = 1, block_rows = 1;
  void cover(const Height& other) {
    tile_rows = std::max(tile_rows, other.tile_rows);
    block_rows = std::max(block_rows, other.block_rows);
  }
};

// What a product reads and writes, in bytes.
struct Traffic {
  int64_t weights = 0, row = 0, out_row = 0;
};

// With rows of their own, all threads read all weights, but no thread has to fetch from another core's caches what that has
// just written (nor will the next op): a byte of a row so saved is worth several of weights, which are asked for ahead.
bool owns_rows(const Traffic& traffic, int64_t rows) {
  constexpr int64_t kWorth = 5;
  return traffic.weights < kWorth * rows * (traffic.row + traffic.out_row);
}

Cut cut(int64_t rows, int64_t panels, const Traffic& traffic, int64_t k, const Height& height, const Pool& pool) {
  const int threads = pool.threads();
  const int64_t row_bytes = traffic.row;
  Cut c;
  c.rows = rows;
  c.panels = panels;
  c.owners = owns_rows(traffic, rows) ? owners_of(pool, rows) : 1;
  if (c.owners > 1) {
    const int64_t blocks = ceil_div(ceil_div(rows, c.owners) * row_bytes, kRowBlockBytes);
    c.row_blocks = c.owners * blocks;
    c.panels_per_task = std::max<int64_t>(1, blocks * panels / kTasksPerThread);
    c.tile_rows = kOwnedAlign;
    return c;
  }
  c.row_blocks = ceil_div(rows * row_bytes, kRowBlockBytes);
  if (threads > 1) {
    const int64_t wanted = threads * kTasksPerThread;
    if (c.row_blocks * panels < wanted) {
      const int64_t smallest = std::max<int64_t>(height.block_rows, kLeastProducts / (k * kPanel));
      c.row_blocks = std::min(ceil_div(wanted, panels), std::max(c.row_blocks, rows / smallest));
    }
    c.panels_per_task = std::max<int64_t>(1, c.row_blocks * panels / wanted);
  } else {
    c.panels_per_task = panels;
  }
  c.row_blocks = std::clamp<int64_t>(c.row_blocks, 1, rows);
  c.tile_rows = whole_tiles(height.tile_rows) ? height.tile_rows : 1;
  return c;
}

ProductTile panel_tile(const PackedWeight& w, int64_t panel) {
  ProductTile tile;
  tile.steps = ceil_div(w.k, step_width(w.scheme));
  tile.panel_bytes = panel_bytes(w.scheme, w.k);
  tile.panel = w.data.as<char>() + panel * tile.panel_bytes;
  tile.groups = w.groups;
  if (w.groups) {
    tile.group_steps = ceil_div(w.group, step_width(w.scheme));
    const int64_t offset = panel * w.groups * kPanel * (w.half_scales ? 2 : 4);
    tile.half_scales = w.half_scales;
    tile.scales = w.scales.as<char>() + offset;
    if (w.minimums.bytes()) tile.minimums = w.minimums.as<char>() + offset;
  }
  return tile;
}

void set_rows(ProductTile& tile, const Activations& x, int64_t first, int rows) {
  tile.rows = rows;
  tile.x_stride = x.spec.row_bytes();
  tile.x = static_cast<const char*>(x.data) + first * tile.x_stride;
  if (tile.groups) {
    tile.x_scales = x.scales + first * tile.groups;
    tile.x_sums = x.sums + first * x.spec.sums();
  }
}

void check(const Activations& x, const PackedWeight& weight, int64_t rows) {
  if (!(x.spec == wanted(weight))) throw std::invalid_argument("activations are not in the form that a weight wants");
  if (x.rows != rows) throw std::invalid_argument("activations of one product differ in their number of rows");
}

// The products that so many rows are worth unpacking for, or null.
const ManyRowProducts* many_row_products(const LinearKernels& kernels, const PackedWeight& weight, int64_t rows) {
  const ManyRowProducts* found = kernels.products->many[static_cast<int>(product_of(weight))];
  return found && rows >= found->least_rows && found->room_bytes(panel_tile(weight, 0)) ? found : nullptr;
}

Height height(const LinearKernels& kernels, const PackedWeight& weight, int64_t rows) {
  if (const ManyRowProducts* many = many_row_products(kernels, weight, rows))
    return {many->tile_rows, many->tile_rows};  // a tile unpacks its panel anew
  const int tile_rows = kernels.products->tile_rows[static_cast<int>(product_of(weight))];
  return {tile_rows, 2 * tile_rows};
}

// Memory of this thread, kept for the next call.
char* product_room(int64_t bytes) {
  static thread_local Buffer memory;
  if (static_cast<int64_t>(memory.bytes()) < bytes) memory = Buffer(static_cast<size_t>(bytes + bytes / 2));
  return memory.as<char>();
}

// One panel, ready for some rows.
class PanelProduct {
  void (*run_)(const ProductTile& tile);
  int64_t room_bytes_ = 0;  // that it works in

 public:
  ProductTile tile;
  int tile_rows, run_rows;  // of `run`, where its results go to a tile
  bool finishes;            // LinearProducts::finishes

  PanelProduct(const LinearKernels& kernels, const PackedWeight& weight, int64_t panel, int64_t rows, float* out)
      : tile(panel_tile(weight, panel)) {
    const int product = static_cast<int>(product_of(weight));
    tile.out = out;
    const auto few = kernels.products->few[product];
    run_ = few && rows <= kFewRows ? few : kernels.products->run[product];
    tile_rows = kernels.products->tile_rows[product];
    finishes = run_ == kernels.products->run[product] && kernels.products->finishes[product];
    run_rows = finishes ? kMaxTileRows : tile_rows;
    const ManyRowProducts* many = many_row_products(kernels, weight, rows);
    if (!many) return;
    room_bytes_ = many->room_bytes(tile);
    run_ = many->run;
    tile_rows = run_rows = many->tile_rows;
  }

  void run() {
    if (room_bytes_) tile.room = product_room(room_bytes_);  // which may lie elsewhere after another product's run
    run_(tile);
  }
};

// How far a single tile looks ahead: what the outer caches send in the time that they take to answer.
constexpr int64_t kAheadBytes = 16 << 10;

// Shares the next panel out among the runs of this one, for prefetching; of many, among the last.
void set_ahead(PanelProduct& product, int64_t index, int64_t count) {
  constexpr int64_t most = 16;
  ProductTile& tile = product.tile;
  if (count == 1 && tile.rows <= product.tile_rows) {  // the tile reads its panel just once: ask for its own weights and the next panel's
    tile.ahead = tile.panel + kAheadBytes;
    tile.ahead_half = kStepBytes / 2;
    tile.ahead_step = kStepBytes;
    return;
  }
  const int64_t sharers = std::min(count, most), share = index - (count - sharers);
  tile.ahead_step = share < 0 ? 0 : kStepBytes / 2 / sharers;
  tile.ahead_half = tile.steps * tile.ahead_step;
  tile.ahead = tile.panel + (share < 0 ? 0 : tile.panel_bytes + 2 * share * tile.ahead_half);
}

// Runs tile(first, rows, index, count) over rows [begin, end).
template <class Tile> void each_tile(int64_t begin, int64_t end, int most, Tile tile) {
  const int64_t rows = end - begin, count = ceil_div(rows, most);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t first = whole_tiles(most) ? i * most : rows * i / count;
    const int64_t next = i + 1 == count ? rows : whole_tiles(most) ? first + most : rows * (i + 1) / count;
    tile(begin + first, static_cast<int>(next - first), i, count);
  }
}

// A result this large (logits of many rows) leaves the caches anyway: it is written past them, unread.
constexpr int64_t kStreamBytes = 4 << 20;
bool streams(const LinearArgs& args, int64_t rows) {
  return !args.residual && rows * args.out_stride * 4 > kStreamBytes && args.out_stride % 16 == 0 &&
         reinterpret_cast<uintptr_t>(args.out) % 64 == 0;
}

// A panel of the head, of which only the largest logits are wanted.
void largest_panel(const LinearKernels& kernels, const LinearArgs& args, int64_t panel, int64_t begin, int64_t end, int thread) {
  const PackedWeight& weight = *args.parts[0];
  alignas(64) float product[kMaxTileRows * kPanel];
  PanelProduct products(kernels, weight, panel, end - begin, product);
  LargestTile out;
  out.product = product;
  out.first = static_cast<int32_t>(panel * kPanel);
  out.columns = static_cast<int>(std::min<int64_t>(kPanel, weight.n - panel * kPanel));
  out.scale = args.scale;
  out.softcap = args.softcap;
  const auto keep = noria::kernels().elementwise->largest_tile;
  each_tile(begin, end, products.run_rows, [&](int64_t first, int rows, int64_t index, int64_t count) {
    set_rows(products.tile, args.x[args.x_of_part[0]], first, rows);
    set_ahead(products, index, count);
    products.run();
    out.rows = rows;
    out.largest = args.largest + thread * args.largest_stride + first;
    out.ids = args.largest_ids + thread * args.largest_stride + first;
    keep(out);
  });
}

// All rows of a panel at once, without an epilogue.
void finish_panel(PanelProduct& products, const LinearArgs& args, const Activations& x, int64_t begin, int64_t end,
                  int64_t column) {
  const int64_t first = begin * args.out_stride + column;
  set_rows(products.tile, x, begin, static_cast<int>(end - begin));
  set_ahead(products, 0, 1);
  products.tile.out = args.out + first;
  products.tile.out_stride = args.out_stride;
  products.tile.bias = args.bias ? args.bias + column : nullptr;
  products.tile.residual = args.residual ? args.residual + first : nullptr;
  products.run();
}

void linear_panel(const LinearKernels& kernels, const LinearArgs& args, int64_t panel, int64_t begin, int64_t end) {
  int part = 0;
  int64_t column = 0;  // first output of the part
  for (; panel >= panels_of(*args.parts[part]); ++part) {
    panel -= panels_of(*args.parts[part]);
    column += args.parts[part]->n;
  }
  const PackedWeight& weight = *args.parts[part];
  const Activations& x = args.x[args.x_of_part[part]];
  column += panel * kPanel;
  alignas(64) float product[kMaxTileRows * kPanel];
  PanelProduct products(kernels, weight, panel, end - begin, product);
  LinearEpilogue epilogue;
  epilogue.columns = static_cast<int>(std::min<int64_t>(kPanel, weight.n - panel * kPanel));
  epilogue.product = product;
  epilogue.bias = args.bias ? args.bias + column : nullptr;
  epilogue.stride = args.out_stride;
  epilogue.scale = args.scale;
  epilogue.softcap = args.softcap;
  epilogue.stream = column % 16 == 0 && streams(args, x.rows);
  if (products.finishes && epilogue.columns == kPanel && !epilogue.stream && args.scale == 1.0f && args.softcap == 0.0f)
    return finish_panel(products, args, x, begin, end, column);
  each_tile(begin, end, products.run_rows, [&](int64_t first, int rows, int64_t index, int64_t count) {
    set_rows(products.tile, x, first, rows);
    set_ahead(products, index, count);
    products.run();
    epilogue.rows = rows;
    epilogue.residual = args.residual ? args.residual + first * args.out_stride + column : nullptr;
    epilogue.out = args.out + first * args.out_stride + column;
    kernels.epilogue(epilogue);
  });
}

// Beside matrix registers in use, and for a while after, the vector units do half as much in a cycle: activations are so left
// until so many rows of products have come together.
constexpr int kGatedRows = 64;

// Whether gate and up are multiplied together, finished by the tiles' idle companions, the vector units; if so, done.
bool gated_together(const LinearKernels& kernels, const GatedLinearArgs& args, int64_t panel, int64_t begin, int64_t end) {
  const Product product = product_of(*args.gate);
  const GatedProducts& gated = kernels.products->gated[static_cast<int>(product)];
  const auto run = args.activation == Activation::silu ? gated.silu : gated.gelu_tanh;
  if (!run || product_of(*args.up) != product || args.gate_x != args.up_x || (panel + 1) * kPanel > args.gate->n ||
      (args.form && args.form_spec.format != Format::bf16))
    return false;
  PanelProduct gate(kernels, *args.gate, panel, end - begin, nullptr), up(kernels, *args.up, panel, end - begin, nullptr);
  if (!gate.finishes) return false;
  const int64_t column = panel * kPanel;
  for (PanelProduct* part : {&gate, &up}) {
    set_rows(part->tile, *args.gate_x, begin, static_cast<int>(end - begin));
    set_ahead(*part, 0, 1);
  }
  GatedProductTile both = {gate.tile, up.tile};
  both.gate.bias = args.gate_bias ? args.gate_bias + column : nullptr;
  both.up.bias = args.up_bias ? args.up_bias + column : nullptr;
  both.out_bf16 = args.form != nullptr;
  if (args.form) {
    const RowTarget target = target_at(args.form_spec, *args.form, begin, column);
    both.out = static_cast<char*>(target.data);
    both.out_bytes = target.row_bytes;
  } else {
    both.out = reinterpret_cast<char*>(args.out + begin * args.out_stride + column);
    both.out_bytes = args.out_stride * 4;
  }
  run(both);
  return true;
}

void gated_panel(const LinearKernels& kernels, const GatedLinearArgs& args, int64_t panel, int64_t begin, int64_t end) {
  if (gated_together(kernels, args, panel, begin, end)) return;
  alignas(64) float gate_product[kGatedRows * kPanel], up_product[kGatedRows * kPanel];
  PanelProduct gate(kernels, *args.gate, panel, end - begin, gate_product);
  PanelProduct up(kernels, *args.up, panel, end - begin, up_product);
  GatedEpilogue epilogue;
  epilogue.columns = static_cast<int>(std::min<int64_t>(kPanel, args.gate->n - panel * kPanel));
  epilogue.gate = gate_product;
  epilogue.up = up_product;
  epilogue.gate_bias = args.gate_bias ? args.gate_bias + panel * kPanel : nullptr;
  epilogue.up_bias = args.up_bias ? args.up_bias + panel * kPanel : nullptr;
  epilogue.stride = args.out_stride;
  const auto finish = args.activation == Activation::silu ? kernels.silu : kernels.gelu_tanh;
  const int most = std::min(gate.run_rows, up.run_rows);
  GatedTile into;
  into.gate = gate_product;
  into.up = up_product;
  into.gate_bias = epilogue.gate_bias;
  into.up_bias = epilogue.up_bias;
  into.function = args.activation == Activation::silu ? Function::silu : Function::gelu_tanh;
  const auto convert = noria::kernels().elementwise->gated_tile;
  int64_t done = begin;  // rows before it have been written
  each_tile(begin, end, most, [&](int64_t first, int rows, int64_t index, int64_t count) {
    gate.tile.out = gate_product + (first - done) * kPanel;
    up.tile.out = up_product + (first - done) * kPanel;
    set_rows(gate.tile, *args.gate_x, first, rows);
    set_rows(up.tile, *args.up_x, first, rows);
    set_ahead(gate, index, count);
    set_ahead(up, index, count);
    gate.run();
    up.run();
    const int ready = static_cast<int>(first + rows - done);
    if (whole_tiles(most) && index + 1 < count && ready + most <= kGatedRows) return;
    if (args.form) {
      into.rows = ready;
      into.target = target_at(args.form_spec, *args.form, done, panel * kPanel);
      convert(into);
    } else {
      epilogue.rows = ready;
      epilogue.out = args.out + done * args.out_stride + panel * kPanel;
      finish(epilogue);
    }
    done += ready;
  });
}

// streaming: some results are written past the caches.
template <class Panel>
void run_tasks(Pool& pool, const LinearKernels& kernels, const Cut& c, bool streaming, Panel panel) {
  const auto run = [&](int64_t block, int64_t first, int64_t end, int thread) {
    for (int64_t p = first; p < std::min(end, first + c.panels_per_task); ++p)
      panel(p, c.first_row(block), c.first_row(block + 1), thread);
    if (kernels.products->done) kernels.products->done();
    if (streaming) std::atomic_thread_fence(std::memory_order_seq_cst);  // such stores are ordered by nothing less
  };
  if (c.row_blocks > 1) {
    const int64_t blocks = c.row_blocks / c.owners;  // of an owner
    return run_owned(pool, c.owners, c.tasks() / c.owners, [&](int owner, int64_t task, int thread) {
      run(owner * blocks + task % blocks, task / blocks * c.panels_per_task, c.panels, thread);
    });
  }
  const int lists = std::min(pool.threads(), kMostOwners);
  const auto start = [&](int list) { return first_panel(c.panels, list, lists); };
  const int64_t most = ceil_div(ceil_div(c.panels, lists), c.panels_per_task);  // tasks of a list
  run_owned(pool, lists, most, [&](int list, int64_t task, int thread) {
    run(0, start(list) + task * c.panels_per_task, start(list + 1), thread);
  });
}

}  // namespace

void linear(Pool& pool, const LinearArgs& args) {
  if (args.part_count < 1) throw std::invalid_argument("a product needs at least one part");
  const LinearKernels& table = *kernels().linear;
  const int64_t rows = args.x[args.x_of_part[0]].rows;
  int64_t panels = 0, k = 0;
  Traffic traffic;
  traffic.out_row = args.largest || streams(args, rows) ? 0 : args.out_stride * 4;
  Height tallest;
  for (int i = 0; i < args.part_count; ++i) {
    const Activations& x = args.x[args.x_of_part[i]];
    check(x, *args.parts[i], rows);
    panels += panels_of(*args.parts[i]);
    traffic.row = std::max(traffic.row, x.spec.row_bytes());
    traffic.weights += static_cast<int64_t>(args.parts[i]->bytes());
    k = std::max(k, args.parts[i]->k);
    tallest.cover(height(table, *args.parts[i], rows));
  }
  if (rows == 0) return;
  const Cut c = cut(rows, panels, traffic, k, tallest, pool);
  const bool streaming = !args.largest && streams(args, rows);
  run_tasks(pool, table, c, streaming, [&](int64_t panel, int64_t begin, int64_t end, int thread) {
    if (args.largest) largest_panel(table, args, panel, begin, end, thread);
    else linear_panel(table, args, panel, begin, end);
  });
}

void gated_linear(Pool& pool, const GatedLinearArgs& args) {
  if (args.gate->n != args.up->n || args.gate->k != args.up->k)
    throw std::invalid_argument("gate and up projections differ in shape");
  const LinearKernels& table = *kernels().linear;
  const int64_t rows = args.gate_x->rows;
  check(*args.gate_x, *args.gate, rows);
  check(*args.up_x, *args.up, rows);
  if (rows == 0) return;
  Traffic traffic;
  traffic.weights = static_cast<int64_t>(args.gate->bytes() + args.up->bytes());
  traffic.row = std::max(args.gate_x->spec.row_bytes(), args.up_x->spec.row_bytes());
  traffic.out_row = args.form ? args.form_spec.row_bytes() : args.out_stride * 4;
  const Cut c = cut(rows, panels_of(*args.gate), traffic, 2 * args.gate->k, height(table, *args.gate, rows), pool);
  run_tasks(pool, table, c, false, [&](int64_t panel, int64_t begin, int64_t end, int) {
    gated_panel(table, args, panel, begin, end);
  });
}

}  // namespace noria

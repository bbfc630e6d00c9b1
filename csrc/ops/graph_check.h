// Whether a graph makes sense: order, widths, rows.
#pragma once
#include "ops/graph.h"

namespace noria {

// Throws std::invalid_argument that names the op at fault.
void check_graph(const Graph& graph);

}  // namespace noria

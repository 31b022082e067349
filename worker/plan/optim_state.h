/* optim_state.h: is an optimizer's state there for all parameters of a group, or for none?
 *
 * Optimizers make their state with the first step, so a checkpoint of before has none, and loads. State of some parameters of a group and
 * not of others was lost on the way (a rank that did not save its part, a save between two steps): a training that goes on from it trains
 * those parameters with fresh moments, and says nothing. The parameters of a group are what `param_groups` lists, in the forms in which
 * PyTorch leaves it in a checkpoint:
 *
 *     optim.param_groups                  a value: [{"params":["a.w","a.b"], …}, …]
 *     optim.param_groups.0.params         a value: ["a.w","a.b"]; DCP flattens lists of dicts since 2.4
 *     optim.param_groups.a.w.lr           flatten_optimizer_state_dict: keys alone; all groups count as one
 *
 * and the state of a.w is whatever lies below optim.state.a.w. Parameters may be numbers (Optimizer.state_dict()). Without param_groups
 * nothing is known of groups, and nothing is said. */
#pragma once
#include <jansson.h>

#include "base/err.h"
#include "base/map.h"
#include "tensor/sdict.h"

struct optim_state {
	const struct sdict *sd;
	struct map params;             /* FQNs up to the parameter, "optim.state.a.w", of those that have state */
};

FALLIBLE enum err optim_state_open(const struct sdict *sd, struct optim_state *out);
void optim_state_close(struct optim_state *s);

enum optim_listing { OPTIM_LISTS_NOTHING, OPTIM_LISTS_GROUPS, OPTIM_LISTS_PARAMS };
/* Tells by a value's name whether it lists groups or parameters. */
enum optim_listing optim_state_listing(struct str fqn);
/* Checks the groups that the value lists, as JSON. Another form than the one expected says nothing. ERR_CHECKPOINT_INCOMPLETE names the
 * first parameter without state of a group that has some. */
FALLIBLE enum err optim_state_check_listed(const struct optim_state *s, struct str fqn, const json_t *value);
/* The same for groups that are keys alone. */
FALLIBLE enum err optim_state_check_keys(const struct optim_state *s);

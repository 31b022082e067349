/* save_interval.c: see save_interval.h. */
#include "server/save_interval.h"

#include <math.h>

double save_interval_young(double cost_s, double mtbf_s)
{
	return sqrt(2 * cost_s * mtbf_s);
}

double save_interval_daly(double cost_s, double mtbf_s)
{
	if (cost_s >= 2 * mtbf_s)
		return mtbf_s;
	double part = cost_s / (2 * mtbf_s);
	return save_interval_young(cost_s, mtbf_s) * (1 + sqrt(part) / 3 + part / 9) - cost_s;
}

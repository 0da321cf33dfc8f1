"""Reads a VTKHDF file with VTK and writes what it found to an .npz file: a program for an environment of its own.

python vtk_program.py FILE.vtkhdf OUT.npz
"""

import sys

import numpy as np


def main() -> None:
    """Reads every step."""
    from vtkmodules.util.numpy_support import vtk_to_numpy  # type: ignore[import-not-found]
    from vtkmodules.vtkIOHDF import vtkHDFReader  # type: ignore[import-not-found]

    reader = vtkHDFReader()
    reader.SetFileName(sys.argv[1])
    reader.UpdateInformation()
    arrays = {}
    times = reader.GetOutputInformation(0).Get(reader.GetExecutive().TIME_STEPS())
    for number, time in enumerate(times):
        reader.UpdateTimeStep(time)
        image = reader.GetOutputDataObject(0)
        data = image.GetPointData()
        for i in range(data.GetNumberOfArrays()):
            arrays[f"{number}/{data.GetArrayName(i)}"] = vtk_to_numpy(data.GetArray(i)).copy()
    arrays["times"] = np.array(times)
    if image.IsA("vtkImageData"):
        arrays |= {"dimensions": np.array(image.GetDimensions())}
        arrays |= {"origin": np.array(image.GetOrigin()), "spacing": np.array(image.GetSpacing())}
    else:
        arrays["points"] = vtk_to_numpy(image.GetPoints().GetData())
        arrays["cells"] = np.array([image.GetCellType(i) for i in range(image.GetNumberOfCells())])
    np.savez(sys.argv[2], **arrays)


if __name__ == "__main__":
    main()
